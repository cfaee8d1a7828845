"""How much of a draft a single request verifies."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """What a user may choose about drafting; none of it changes what comes out.

    Attributes:
        max_draft_tokens: draft tokens of a round at most; None for the drafter's block size. 0 drafts nothing.
        confidence_threshold: verify a draft up to its first token that is less likely than this to be accepted (the
            paper's static threshold, section 4); None verifies all of it. The choice for a token depends on the tokens
            before it alone (SPEC eq. 7), which keeps the output distribution.

    Raises:
        ValueError: naming the field.
    """

    max_draft_tokens: int | None = None
    confidence_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.max_draft_tokens is not None and self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must not be negative, got {self.max_draft_tokens}")
        threshold = self.confidence_threshold
        if threshold is not None and not (math.isfinite(threshold) and 0.0 <= threshold <= 1.0):
            raise ValueError(f"confidence_threshold must be a probability, 0 to 1, got {threshold}")

    def verify_length(self, confidences: tuple[float, ...]) -> int:
        """Draft tokens to verify, from the confidence of each, in order."""
        if self.confidence_threshold is None:
            return len(confidences)
        for length, confidence in enumerate(confidences):
            if confidence < self.confidence_threshold:
                return length
        return len(confidences)

"""What one round of decoding told, as a record that can be stored, pooled and fitted on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dspark.calibration.judged_rounds import JudgedRounds

__all__ = ["RoundRecord", "judged_rounds"]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round.

    Attributes:
        prompt_id: the prompt it belongs to; rounds of one prompt are not independent of each other.
        drafted, verified: draft tokens proposed, and sent to the target.
        judged: verified tokens whose fate is known: an answer may end inside the accepted run, and what lies behind is
            neither accepted nor rejected.
        accepted: draft tokens committed.
        committed: tokens committed, bonus or correction included.
        confidence_logits: raw, of every drafted token; None from a drafter without confidence head.
        sampling_temperature: of the request.

    Raises:
        ValueError: naming the field.
    """

    prompt_id: str
    drafted: int
    verified: int
    judged: int
    accepted: int
    committed: int
    confidence_logits: tuple[float, ...] | None
    sampling_temperature: float

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.judged <= self.verified <= self.drafted:
            raise ValueError(
                f"a round of prompt {self.prompt_id} has accepted {self.accepted}, judged {self.judged}, verified"
                f" {self.verified}, drafted {self.drafted}; each must be at most the next"
            )
        if not self.accepted <= self.committed <= self.accepted + 1 or self.committed == 0:
            raise ValueError(
                f"committed is {self.committed} in a round of prompt {self.prompt_id} with {self.accepted} accepted;"
                " the target adds one token, unless the answer ends before it"
            )
        if self.confidence_logits is not None and len(self.confidence_logits) != self.drafted:
            raise ValueError(
                f"a round of prompt {self.prompt_id} has {len(self.confidence_logits)} confidence_logits for"
                f" {self.drafted} drafted tokens"
            )

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            "prompt_id": self.prompt_id,
            "drafted": self.drafted,
            "verified": self.verified,
            "judged": self.judged,
            "accepted": self.accepted,
            "committed": self.committed,
            "confidence_logits": None if self.confidence_logits is None else list(self.confidence_logits),
            "sampling_temperature": self.sampling_temperature,
        }

    @classmethod
    def from_json(cls, content: object) -> RoundRecord:
        """Read plain data; fields it does not know are left aside. Raises ValueError that names the field."""
        if not isinstance(content, dict):
            raise ValueError("a round must be a JSON object")
        if not isinstance(content.get("prompt_id"), str):
            raise ValueError(f"prompt_id must be a string, got {content.get('prompt_id')!r}")
        if not _is_number(content.get("sampling_temperature")):
            raise ValueError(f"sampling_temperature must be a number, got {content.get('sampling_temperature')!r}")
        logits = content.get("confidence_logits")
        if logits is not None and not (isinstance(logits, list) and all(map(_is_number, logits))):
            raise ValueError("confidence_logits must be a list of numbers, or null")
        return cls(
            prompt_id=content["prompt_id"],
            confidence_logits=None if logits is None else tuple(float(logit) for logit in logits),
            sampling_temperature=float(content["sampling_temperature"]),
            drafted=_count(content, "drafted"),
            verified=_count(content, "verified"),
            judged=_count(content, "judged"),
            accepted=_count(content, "accepted"),
            committed=_count(content, "committed"),
        )

    def to_line(self, **more: Any) -> str:
        """A JSONL line with its line break; ``more`` are keys beside the record's own."""
        return json.dumps(self.to_json() | more, ensure_ascii=False, separators=(",", ":")) + "\n"


def judged_rounds(records: Sequence[RoundRecord], block_size: int) -> JudgedRounds:
    """The records as arrays for calibration; rounds without a draft have nothing to say and are left out.

    Raises:
        ValueError: a round was not verified to its end, has no confidence logits, or is longer than ``block_size``.
    """
    drafted = [record for record in records if record.drafted > 0]
    logits_NG = np.full((len(drafted), block_size), np.nan)
    for row, record in enumerate(drafted):
        if record.confidence_logits is None:
            raise ValueError(
                f"a round of prompt {record.prompt_id} has no confidence_logits: only a drafter with a confidence head"
                " can be calibrated"
            )
        if record.drafted > block_size:
            raise ValueError(
                f"a round of prompt {record.prompt_id} has {record.drafted} draft tokens, more than the block size"
                f" {block_size}: it is another drafter's"
            )
        logits_NG[row, : record.drafted] = record.confidence_logits
    return JudgedRounds(
        logits_NG=logits_NG,
        accepted_N=np.array([record.accepted for record in drafted], dtype=np.int64),
        judged_N=np.array([record.judged for record in drafted], dtype=np.int64),
        verified_N=np.array([record.verified for record in drafted], dtype=np.int64),
        prompts_N=np.array([_prompt_number(record.prompt_id) for record in drafted], dtype=np.int64),
    )


@cache
def _prompt_number(prompt_id: str) -> int:
    # The same number in every call, so that rounds of several calls can be joined.
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:7], "big")


def _count(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""Rounds that were verified to their end, as arrays: what calibration is fitted on and measured with.

Letters in names: N rounds, G draft positions, M rounds that serve one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["JudgedRounds", "Labelled", "joined", "sigmoid"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Probabilities beside what happened.

    Attributes:
        confidences_M: estimates that the outcome is true.
        outcomes_M: whether it was.
        prompts_M: prompt of each.
    """

    confidences_M: Floats
    outcomes_M: Booleans
    prompts_M: Integers

    @classmethod
    def joined(cls, parts: Sequence[Labelled]) -> Labelled:
        """The pairs of several sets."""
        return cls(
            confidences_M=np.concatenate([part.confidences_M for part in parts]),
            outcomes_M=np.concatenate([part.outcomes_M for part in parts]),
            prompts_M=np.concatenate([part.prompts_M for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class JudgedRounds:
    """Confidence logits and fates of draft tokens.

    **Which rounds serve which position.** Round n serves position k when the fate of its prefix of length k is known:
    ``k <= judged``. There are two honest reasons for a fate to be unknown, and one that is refused:

    - The draft was shorter, since ``max_tokens`` left no room. That has nothing to do with whether its tokens would
      have been accepted, so the round serves the positions that it has.
    - The answer ended inside the accepted run, by a stop token at position j. Prefixes up to j were accepted, and the
      round serves them; dropping it would take accepted prefixes away and keep rejected ones. Behind the stop nothing
      is committed, so nothing there was accepted or rejected, and the round serves no k > j. What remains is small: a
      draft that holds a stop token serves positions behind it only when it was rejected before it, at most one round
      an answer.
    - The schedule cut the draft before verification. That choice was made from the very confidences that are to be
      judged, so a fit on what was left would be a fit on selected rounds: refused.

    Attributes:
        logits_NG: raw confidence logits, NaN where no token was drafted (only behind the drafted ones).
        accepted_N: length of the accepted prefix.
        judged_N: draft tokens whose fate is known.
        verified_N: draft tokens sent to the target.
        prompts_N: number of the prompt that the round belongs to.

    Raises:
        ValueError: naming the array, and for rounds not verified to their end.
    """

    logits_NG: Floats
    accepted_N: Integers
    judged_N: Integers
    verified_N: Integers
    prompts_N: Integers

    def __post_init__(self) -> None:
        if self.logits_NG.ndim != 2:
            raise ValueError(f"logits_NG must have two dimensions, rounds and positions, not {self.logits_NG.ndim}")
        for name in ("accepted_N", "judged_N", "verified_N", "prompts_N"):
            if getattr(self, name).shape != (len(self.logits_NG),):
                raise ValueError(f"{name} must have one number for each of {len(self.logits_NG)} rounds")
        drafted_NG = ~np.isnan(self.logits_NG)
        drafted_N = drafted_NG.sum(axis=1)
        if not np.array_equal(drafted_NG, np.arange(self.block_size) < drafted_N[:, None]):
            raise ValueError("logits_NG has a position without a logit before one with")
        if np.isinf(self.logits_NG).any():
            raise ValueError("logits_NG must be finite")
        if truncated := int((self.verified_N != drafted_N).sum()):
            raise ValueError(
                f"{truncated} of {len(self)} rounds were not verified to the end of their draft: what was not verified"
                " has no label, and what was cut was chosen by the confidence itself. Collect rounds at full"
                " verification (no confidence threshold, no scheduler)"
            )
        if (self.accepted_N < 0).any() or (self.accepted_N > self.judged_N).any():
            raise ValueError("accepted_N must be between 0 and judged_N")
        if (self.judged_N > self.verified_N).any():
            raise ValueError("judged_N must be at most verified_N")
        if ((self.judged_N < self.verified_N) & (self.accepted_N < self.judged_N)).any():
            raise ValueError(
                "judged_N is below verified_N in a round with a rejection: only an answer that ends inside the accepted"
                " run leaves tokens without a fate"
            )

    def __len__(self) -> int:
        return len(self.logits_NG)

    @property
    def block_size(self) -> int:
        """Draft positions G."""
        return int(self.logits_NG.shape[1])

    def select(self, keep_N: Booleans | Integers) -> JudgedRounds:
        """Some of the rounds, by mask or index."""
        return JudgedRounds(
            logits_NG=self.logits_NG[keep_N],
            accepted_N=self.accepted_N[keep_N],
            judged_N=self.judged_N[keep_N],
            verified_N=self.verified_N[keep_N],
            prompts_N=self.prompts_N[keep_N],
        )

    def shifted(self, offset: float) -> JudgedRounds:
        """The same rounds with ``offset`` added to every logit."""
        return replace(self, logits_NG=self.logits_NG + offset)

    def confidences(self, temperatures: Sequence[float] | Floats) -> Floats:
        """``c_k = σ(z_k / T_k)`` of every draft token ``[N, G]``; NaN where none was drafted.

        ``temperatures`` has one number for each position; empty leaves the logits as they are.
        """
        if len(temperatures) == 0:
            return sigmoid(self.logits_NG)
        if len(temperatures) != self.block_size:
            raise ValueError(f"there are {len(temperatures)} temperatures for {self.block_size} positions")
        return sigmoid(self.logits_NG / np.asarray(temperatures, dtype=np.float64))

    def survival(self, position: int, temperatures: Sequence[float] | Floats = ()) -> Labelled:
        """Estimated survival ``a_k``, the product of c_1..c_k, beside "prefix k accepted"; k from 1."""
        self._check_position(position)
        serves_N = self.judged_N >= position
        confidences_MG = self.select(serves_N).confidences(temperatures)[:, :position]
        return Labelled(
            confidences_M=confidences_MG.prod(axis=1),
            outcomes_M=self.accepted_N[serves_N] >= position,
            prompts_M=self.prompts_N[serves_N],
        )

    def conditional(self, position: int, temperatures: Sequence[float] | Floats = ()) -> Labelled:
        """``c_k`` beside "token k accepted", where all tokens before it were; k from 1."""
        self._check_position(position)
        serves_N = (self.judged_N >= position) & (self.accepted_N >= position - 1)
        return Labelled(
            confidences_M=self.select(serves_N).confidences(temperatures)[:, position - 1],
            outcomes_M=self.accepted_N[serves_N] >= position,
            prompts_M=self.prompts_N[serves_N],
        )

    def _check_position(self, position: int) -> None:
        if not 1 <= position <= self.block_size:
            raise ValueError(f"position is {position}; the block has positions 1 to {self.block_size}")


def joined(parts: Sequence[JudgedRounds]) -> JudgedRounds:
    """All rounds of several sets; prompt numbers must mean the same prompts in all of them."""
    return JudgedRounds(
        logits_NG=np.concatenate([part.logits_NG for part in parts]),
        accepted_N=np.concatenate([part.accepted_N for part in parts]),
        judged_N=np.concatenate([part.judged_N for part in parts]),
        verified_N=np.concatenate([part.verified_N for part in parts]),
        prompts_N=np.concatenate([part.prompts_N for part in parts]),
    )


def sigmoid(logits: Floats) -> Floats:
    """``1 / (1 + exp(-z))`` without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits)), dtype=np.float64)

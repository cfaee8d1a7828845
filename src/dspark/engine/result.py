"""What a generation reports, round by round and at the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One finished answer and how it came about.

    The first token comes out of the prompt's own pass: it belongs to no round. Draft tokens after a cut (stop token,
    stop string) are in ``drafted`` and ``verified``, since they were paid for, and nowhere else.

    Attributes:
        token_ids: generated tokens; a stop token that ended the answer is the last one.
        finish_reason: ``stop`` (stop token or stop string) or ``length`` (``max_tokens`` or the end of the context).
        rounds: target passes after the prompt's.
        drafted, verified, accepted: draft tokens proposed, sent to the target, committed.
        accepted_length: tokens committed in rounds / rounds, bonus and correction included; 0 without a round.
        seconds: time spent generating (what the caller does between rounds is not in it); of it ``prefill_seconds``
            for the prompt with its first token, ``draft_seconds``, ``schedule_seconds`` for choosing how much of a
            draft to verify, ``verify_seconds`` for target passes and acceptance, and ``commit_seconds``.
        accepted_per_position, reached_per_position, verified_per_position: rounds, for draft position 1, 2, ..., in
            which the token was accepted / was verified and all before it were accepted / was verified. Positions after
            a cut are in none. accepted / reached is the conditional acceptance, accepted / verified the prefix
            survival.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    rounds: int
    drafted: int
    verified: int
    accepted: int
    accepted_length: float
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    schedule_seconds: float
    verify_seconds: float
    commit_seconds: float
    accepted_per_position: tuple[int, ...]
    reached_per_position: tuple[int, ...]
    verified_per_position: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """All fields, ready for ``json.dumps``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """What one step committed: its first ``accepted`` tokens were drafted, the rest is the target's.

    ``text`` is what became safe to show; it can lag behind the tokens. ``result`` is set on the last event.

    Attributes:
        drafted, verified: draft tokens proposed, and sent to the target.
        judged: verified tokens whose fate is known: the answer may end inside the accepted run, and what lies behind
            is neither accepted nor rejected.
        confidence_logits: of every drafted token, before calibration; None from a drafter without confidence head.
    """

    token_ids: tuple[int, ...]
    text: str
    accepted: int
    drafted: int
    verified: int
    judged: int = 0
    confidence_logits: tuple[float, ...] | None = None
    result: GenerationResult | None = None

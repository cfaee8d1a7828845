"""Records made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.evaluation.answers import Answer, Record, Timing
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.evaluation.rounds import RoundRecord


def prompt(name: str, *, turns: int = 1, domain: str = "math") -> EvaluationPrompt:
    return EvaluationPrompt(
        id=name,
        benchmark=name.split("/", maxsplit=1)[0],
        domain=domain,
        turns=tuple(f"turn {turn}" for turn in range(turns)),
    )


def round_of(
    accepted: int,
    *,
    drafted: int = 3,
    verified: int | None = None,
    judged: int | None = None,
    committed: int | None = None,
    logits: Sequence[float] | None = None,
    prompt_id: str = "p",
) -> RoundRecord:
    verified = drafted if verified is None else verified
    return RoundRecord(
        prompt_id=prompt_id,
        drafted=drafted,
        verified=verified,
        judged=verified if judged is None else judged,
        accepted=accepted,
        committed=accepted + 1 if committed is None else committed,
        confidence_logits=None if logits is None else tuple(logits),
        sampling_temperature=0.0,
    )


def answer(
    rounds: Sequence[RoundRecord],
    *,
    text: str = "text",
    token_ids: Sequence[int] | None = None,
    seconds: float = 2.0,
    prefill: float = 1.0,
) -> Answer:
    count = 1 + sum(record.committed for record in rounds)
    return Answer(
        text=text,
        token_ids=tuple(range(count)) if token_ids is None else tuple(token_ids),
        finish_reason="length",
        prompt_tokens=4,
        timing=Timing(total=seconds, prefill=prefill, draft=0.25, schedule=0.0, verify=0.5, commit=0.125),
        rounds=tuple(rounds),
    )


def record(arm: str, prompt_id: str, given: Answer, *, turn: int = 0) -> Record:
    return Record(arm=arm, prompt_id=prompt_id, turn=turn, answer=given)

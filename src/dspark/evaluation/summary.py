"""The numbers of an evaluation, from its records: every arm by benchmark, by domain and over all, and arms compared.

SPEC.md "Numbers that are reported, and how" is what is computed. Nothing here estimates an accepted length from
acceptance rates: acceptances of one round hang together, and the product of their means is not the mean of their
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.evaluation.answers import Answer, Record
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.evaluation.plan import TARGET_ALONE, Arm
from dspark.evaluation.rounds import RoundRecord
from dspark.evaluation.statistics import CONFIDENCE_LEVEL, RESAMPLES, Estimate, Ratio, Resampling

__all__ = ["PHASES", "completed_prompts", "rounds_of", "summarise"]

PHASES = ("draft", "schedule", "verify", "commit")
Floats = NDArray[np.float64]
Answers = Mapping[tuple[str, str], Sequence[Answer]]
"""The answers to all turns of a prompt, by (arm, prompt id)."""


def completed_prompts(
    prompts: Sequence[EvaluationPrompt], arms: Sequence[Arm], records: Iterable[Record]
) -> tuple[list[EvaluationPrompt], Answers, dict[str, str]]:
    """The prompts that every arm has answered to the last turn, their answers, and why others were skipped."""
    found: dict[tuple[str, str], dict[int, Answer]] = {}
    skipped: dict[str, str] = {}
    for record in records:
        if record.answer is None:
            skipped[record.prompt_id] = record.skipped or ""
        else:
            found.setdefault((record.arm, record.prompt_id), {})[record.turn] = record.answer
    complete = [
        prompt
        for prompt in prompts
        if prompt.id not in skipped
        and all(len(found.get((arm.label, prompt.id), ())) == len(prompt.turns) for arm in arms)
    ]
    answers = {
        (arm.label, prompt.id): [found[arm.label, prompt.id][turn] for turn in range(len(prompt.turns))]
        for prompt in complete
        for arm in arms
    }
    return complete, answers, skipped


def rounds_of(arm: str, prompts: Iterable[EvaluationPrompt], answers: Answers) -> list[RoundRecord]:
    """All rounds of an arm."""
    return [record for prompt in prompts for answer in answers[arm, prompt.id] for record in answer.rounds]


def summarise(
    prompts: Sequence[EvaluationPrompt],
    arms: Sequence[Arm],
    records: Iterable[Record],
    *,
    repeatable: bool,
    seed: int,
    concurrency: int = 1,
) -> dict[str, Any]:
    """Everything that is counted, as plain data.

    ``speed`` says what ``speed_up`` and ``speed_ratio`` compare. Of one answer at a time it is decoding, the prompt's
    pass left out. Of several it is throughput: all tokens by all seconds. A prompt then shares its step with others, so
    that decoding has no time of its own.

    Args:
        repeatable: whether outputs with and without speculation have to be the same (temperature 0, or seeded).
        seed: of the draws behind the intervals.
        concurrency: answers that were made at once.
    """
    complete, answers, skipped = completed_prompts(prompts, arms, records)
    answers_of = {arm.label: [answers[arm.label, prompt.id] for prompt in complete] for arm in arms}
    counts_of = {label: _count(answered) for label, answered in answers_of.items()}
    groups = {
        name: _Group(
            answers={label: [answered[row] for row in rows] for label, answered in answers_of.items()},
            counts={label: counts.of(rows) for label, counts in counts_of.items()},
            resampling=Resampling(len(rows), seed=seed),
            is_throughput=concurrency > 1,
        )
        for name, rows in _groups(complete).items()
    }
    has_baseline = any(arm.drafter is None for arm in arms)
    drafting = [arm for arm in arms if arm.drafter is not None]
    base = [arm for arm in arms if arm.is_base]

    def by_group(content: Callable[[_Group], dict[str, Any]]) -> dict[str, Any]:
        tables: dict[str, Any] = {"overall": {}, "domains": {}, "benchmarks": {}}
        for (level, name), group in groups.items():
            if level == "overall":
                tables["overall"] = content(group)
            else:
                tables[level][name] = content(group)
        return tables

    def arm_numbers(arm: Arm) -> dict[str, Any]:
        numbers = by_group(lambda group: group.numbers(arm, has_baseline=has_baseline, repeatable=repeatable))
        means = {
            name: _mean([domain[name] for domain in numbers["domains"].values()])
            for name in ("accepted_length", "speed_up")
        }
        place = {
            "label": arm.label,
            "drafter": arm.drafter,
            "draft_tokens": arm.draft_tokens,
            "threshold": arm.threshold,
        }
        return place | numbers | {"mean_of_domains": means}

    def comparison(reference: Arm, other: Arm) -> dict[str, Any]:
        return {"reference": reference.label, "other": other.label} | by_group(
            lambda group: group.comparison(reference, other)
        )

    alone = {arm.label: by_group(lambda group, arm=arm: group.speed(arm)) for arm in arms if arm.drafter is None}  # type: ignore[misc]
    return {
        "prompts": len(prompts),
        "completed": len(complete),
        "skipped": skipped,
        "repeatable": repeatable,
        "speed": {"of": "throughput" if concurrency > 1 else "decoding", "concurrency": concurrency},
        "intervals": {"level": CONFIDENCE_LEVEL, "resamples": RESAMPLES, "over": "prompts", "seed": seed},
        "target_alone": alone.get(TARGET_ALONE),
        "arms": [arm_numbers(arm) for arm in drafting],
        "comparisons": [comparison(reference, other) for reference, other in combinations(base, 2)],
    }


def _groups(prompts: Sequence[EvaluationPrompt]) -> dict[tuple[str, str], list[int]]:
    """Which prompts, by number, each line of a table is about."""
    groups: dict[tuple[str, str], list[int]] = {("overall", ""): list(range(len(prompts)))}
    for row, prompt in enumerate(prompts):
        groups.setdefault(("domains", prompt.domain), []).append(row)
        groups.setdefault(("benchmarks", prompt.benchmark), []).append(row)
    return groups


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Sums over the answers of each prompt (P), and for draft positions 1, 2, ... (G)."""

    answers_P: Floats
    tokens_P: Floats
    rounds_P: Floats
    drafted_P: Floats
    verified_P: Floats
    accepted_P: Floats
    committed_P: Floats
    seconds_P: Floats
    prefill_seconds_P: Floats
    phase_seconds: Mapping[str, Floats]
    judged_PG: Floats
    reached_PG: Floats
    accepted_PG: Floats

    def of(self, rows: Sequence[int]) -> _Counts:
        """The counts of some of the prompts."""
        chosen = {
            field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "phase_seconds"
        }
        return _Counts(**chosen, phase_seconds={name: column[rows] for name, column in self.phase_seconds.items()})

    @property
    def decode(self) -> Ratio:
        """Tokens of rounds a second of rounds: what speculation changes. The prompt's pass is in neither."""
        return Ratio(
            numerators_P=self.tokens_P - self.answers_P, denominators_P=self.seconds_P - self.prefill_seconds_P
        )

    @property
    def whole(self) -> Ratio:
        """Tokens a second, the prompt's pass included."""
        return Ratio(numerators_P=self.tokens_P, denominators_P=self.seconds_P)

    @property
    def accepted_length(self) -> Ratio:
        """τ: committed tokens a round."""
        return Ratio(numerators_P=self.committed_P, denominators_P=self.rounds_P)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The prompts that one line of a table is about: answers of each and counts, by arm, and what speed means."""

    answers: Mapping[str, Sequence[Sequence[Answer]]]
    counts: Mapping[str, _Counts]
    resampling: Resampling
    is_throughput: bool

    def speed(self, arm: Arm) -> dict[str, Any]:
        counts = self.counts[arm.label]
        return {
            "prompts": self.resampling.num_prompts,
            "answers": int(counts.answers_P.sum()),
            "tokens": int(counts.tokens_P.sum()),
            "tokens_per_second": _json(self.resampling.ratio(counts.whole)),
            "decode_tokens_per_second": None if self.is_throughput else _json(self.resampling.ratio(counts.decode)),
        }

    def speed_ratio(self, arm: str, reference: str) -> dict[str, Any] | None:
        """How much faster an arm is than another."""
        ours, theirs = self.counts[arm], self.counts[reference]
        if self.is_throughput:
            return _json(self.resampling.quotient(ours.whole, theirs.whole))
        return _json(self.resampling.quotient(ours.decode, theirs.decode))

    def numbers(self, arm: Arm, *, has_baseline: bool, repeatable: bool) -> dict[str, Any]:
        counts = self.counts[arm.label]
        ratio, rounds = self.resampling.ratio, counts.rounds_P.sum()
        verified_acceptance = Ratio(numerators_P=counts.accepted_P, denominators_P=counts.verified_P)
        phases = {name: float(seconds_P.sum()) for name, seconds_P in counts.phase_seconds.items()}
        other = counts.seconds_P.sum() - counts.prefill_seconds_P.sum() - sum(phases.values())
        numbers: dict[str, Any] = self.speed(arm) | {
            "rounds": int(rounds),
            "drafted": int(counts.drafted_P.sum()),
            "verified": int(counts.verified_P.sum()),
            "accepted": int(counts.accepted_P.sum()),
            "committed": int(counts.committed_P.sum()),
            "accepted_length": _json(ratio(counts.accepted_length)),
            "verified_token_acceptance": _json(ratio(verified_acceptance)),
            "positions": [self._position(counts, position) for position in range(counts.judged_PG.shape[1])],
            "seconds": {
                "total": float(counts.seconds_P.sum()),
                "prefill": float(counts.prefill_seconds_P.sum()),
                **phases,
                "other": float(other),
            },
            "milliseconds_per_round": {
                name: 1000.0 * seconds / float(rounds) if rounds else None for name, seconds in phases.items()
            },
            "speed_up": None,
            "end_to_end_speed_up": None,
            "identical": None,
        }
        if has_baseline:
            alone = self.counts[TARGET_ALONE]
            numbers["speed_up"] = self.speed_ratio(arm.label, TARGET_ALONE)
            numbers["end_to_end_speed_up"] = _json(self.resampling.quotient(counts.whole, alone.whole))
        if has_baseline and repeatable:
            pairs = zip(self.answers[arm.label], self.answers[TARGET_ALONE], strict=True)
            numbers["identical"] = sum(
                one.token_ids == other.token_ids
                for ours, theirs in pairs
                for one, other in zip(ours, theirs, strict=True)
            )
        return numbers

    def comparison(self, reference: Arm, other: Arm) -> dict[str, Any]:
        ours, theirs = self.counts[other.label], self.counts[reference.label]
        difference = self.resampling.difference(ours.accepted_length, theirs.accepted_length)
        return {
            "prompts": self.resampling.num_prompts,
            "accepted_length_difference": _json(difference),
            "speed_ratio": self.speed_ratio(other.label, reference.label),
        }

    def _position(self, counts: _Counts, position: int) -> dict[str, Any]:
        accepted_P, reached_P = counts.accepted_PG[:, position], counts.reached_PG[:, position]
        judged_P = counts.judged_PG[:, position]
        ratio = self.resampling.ratio
        return {
            "position": position + 1,
            "accepted": int(accepted_P.sum()),
            "reached": int(reached_P.sum()),
            "verified": int(judged_P.sum()),
            "conditional_acceptance": _json(ratio(Ratio(numerators_P=accepted_P, denominators_P=reached_P))),
            "prefix_survival": _json(ratio(Ratio(numerators_P=accepted_P, denominators_P=judged_P))),
        }


def _count(answers_of_prompts: Sequence[Sequence[Answer]]) -> _Counts:
    width = max(
        (record.drafted for answers in answers_of_prompts for answer in answers for record in answer.rounds), default=0
    )

    def per_prompt(number: Callable[[Answer], float]) -> Floats:
        return np.array([sum(number(answer) for answer in answers) for answers in answers_of_prompts], np.float64)

    def per_round(number: Callable[[RoundRecord], int]) -> Floats:
        return per_prompt(lambda answer: sum(number(record) for record in answer.rounds))

    def per_position(holds: Callable[[RoundRecord, int], bool]) -> Floats:
        columns = [
            per_round(lambda record, position=position: holds(record, position))  # type: ignore[misc]
            for position in range(1, width + 1)
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((len(answers_of_prompts), 0))

    def phase(name: str) -> Floats:
        return per_prompt(lambda answer: getattr(answer.timing, name))

    return _Counts(
        answers_P=per_prompt(lambda answer: 1),
        tokens_P=per_prompt(lambda answer: len(answer.token_ids)),
        rounds_P=per_prompt(lambda answer: len(answer.rounds)),
        drafted_P=per_round(lambda record: record.drafted),
        verified_P=per_round(lambda record: record.verified),
        accepted_P=per_round(lambda record: record.accepted),
        committed_P=per_round(lambda record: record.committed),
        seconds_P=per_prompt(lambda answer: answer.timing.total),
        prefill_seconds_P=per_prompt(lambda answer: answer.timing.prefill),
        phase_seconds={name: phase(name) for name in PHASES},
        judged_PG=per_position(lambda record, position: record.judged >= position),
        reached_PG=per_position(lambda record, position: record.judged >= position and record.accepted >= position - 1),
        accepted_PG=per_position(lambda record, position: record.accepted >= position),
    )


def _json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_json()


def _mean(estimates: Sequence[Mapping[str, Any] | None]) -> float | None:
    values = [estimate["value"] for estimate in estimates if estimate is not None]
    return sum(values) / len(values) if values and len(values) == len(estimates) else None

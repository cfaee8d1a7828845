"""Everything an evaluation found, as plain data; tables, figures and page are made from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.evaluation.answers import Record
from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.evaluation.plan import Arm, DrafterFacts
from dspark.evaluation.reliability import reliability
from dspark.evaluation.summary import completed_prompts, rounds_of, summarise

__all__ = ["build_report"]


def build_report(
    prompts: Sequence[EvaluationPrompt],
    drafters: Sequence[DrafterFacts],
    arms: Sequence[Arm],
    records: Iterable[Record],
    *,
    settings: Mapping[str, Any],
    repeatable: bool,
    seed: int,
    sessions: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The report: settings, drafters, numbers by group, comparisons, reliability, provenance.

    Only prompts that every arm has answered count, so that all numbers of a report are about the same prompts.

    Args:
        repeatable: as in :func:`summarise`.
        seed: of the draws behind the intervals.
        sessions: provenance of every process that answered.
    """
    records = list(records)
    complete, answers, _ = completed_prompts(prompts, arms, records)
    bases = {arm.drafter: arm for arm in arms if arm.is_base}
    return {
        "settings": dict(settings),
        "drafters": [drafter.to_json() for drafter in drafters],
        **summarise(prompts, arms, records, repeatable=repeatable, seed=seed, concurrency=settings["concurrency"]),
        "reliability": {
            drafter.label: reliability(drafter, rounds_of(bases[drafter.label].label, complete, answers))
            for drafter in drafters
        },
        "sessions": [dict(session) for session in sessions],
    }

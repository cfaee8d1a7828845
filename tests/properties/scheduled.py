"""The real policies inside the enumeration, and wrong ones beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dspark.decoding.enumeration import DraftedRound, Tokens
from dspark.scheduling import Correction, Drafts, History, MeasuredCurve, PastSurvivals, Policy, StepBatch, StepCost
from dspark.scheduling.admission import global_maximum, ranked_survivals, throughput, verify_lengths
from dspark.scheduling.policies import StepPlan

Confidence = Callable[[int, Tokens, Tokens], float]
"""(request, prefix, x_1..x_{k-1}) -> c_k. By its type it cannot see x_k."""


def made_up_confidence(seed: int) -> Confidence:
    """Any number in [0, 1] for any prefix, the ends and ties included; unrelated to what is really accepted."""
    levels = (0.0, 0.35, 0.6, 0.6, 0.8, 0.95, 1.0)

    def confidence(request: int, prefix: Tokens, drafted: Tokens) -> float:
        key = [seed, request, len(prefix), *prefix, 99, *drafted]
        return float(np.random.default_rng(key).choice(levels))

    return confidence


def staircase_cost(seed: int, num_requests: int = 2) -> StepCost:
    """A random staircase of low steps over 1..16 tokens; the draft is cheap but not free."""
    return cost_of_increments(np.random.default_rng(seed).choice([0.0, 0.05, 0.2, 0.4], size=16))


def cliff_cost(seed: int, num_requests: int) -> StepCost:
    """The first draft token is so dear that it never pays alone, the next ones are free: what a greedy search cannot
    cross, and a search over current confidences crosses only where it likes what it sees behind."""
    increments = np.zeros(16)
    increments[num_requests] = np.random.default_rng(seed).choice([0.7, 0.9, 1.1])
    increments[num_requests + 5] = 0.5
    return cost_of_increments(increments)


def cost_of_increments(increments: np.ndarray) -> StepCost:
    return StepCost(
        verify=MeasuredCurve(sizes=tuple(range(1, 17)), seconds=tuple(1.0 + np.cumsum(increments))),
        draft={1: MeasuredCurve(sizes=(1, 3), seconds=(0.02, 0.05))},
        prefill=MeasuredCurve(sizes=(1,), seconds=(0.3,)),
        schedule_seconds=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class Retrospective:
    """Wrong (Appendix A): the global maximum over current survivals, which depend on the tokens it is about."""

    name: str = "retrospective"

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost) -> StepPlan:
        return StepPlan(batch=batch, draft_lengths_R=batch.draftable_R, why="always")

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost):
        ranked_N = ranked_survivals(drafts.survivals_RG, drafts.lengths_R)
        theta_K = throughput(ranked_N, plan.batch, drafts.lengths_R, cost)
        return verify_lengths(drafts.survivals_RG, drafts.lengths_R, global_maximum(theta_K))


class ScheduledBatch:
    """A policy as the enumeration calls it: it remembers survivals and what has been learned from acceptances.

    What became of a step's drafts is known once its tokens are emitted (`learns`). Tokens of later steps are drawn from
    the target given those, whatever they and their acceptances were, so lengths may depend on them as on anything else
    that is past (SPEC "Hardware-aware prefix scheduler"); ``judges`` is for a scheduler that does not wait.

    ``seen`` counts (why, budget, lengths) of every decision, so that a test can show that it was not a vacuous one.

    Args:
        judges: wrong: (request, prefix, x_1..x_g) -> how many of the tokens that are to be scheduled will be accepted,
            which corrects the confidences before it is settled how many of them are verified.
    """

    def __init__(
        self,
        policy: Policy,
        cost: StepCost,
        confidence: Confidence,
        *,
        prefill_tokens: int = 0,
        token_limit: int | None = None,
        sees_own_token: bool = False,
        judges: Callable[[int, Tokens, Tokens], int] | None = None,
    ) -> None:
        self.policy, self.cost, self.confidence = policy, cost, confidence
        self.prefill_tokens, self.token_limit = prefill_tokens, token_limit
        self.sees_own_token, self.judges = sees_own_token, judges
        self.seen: Counter[tuple] = Counter()
        self._decided: dict[tuple, tuple[tuple[int, ...], Hashable]] = {}
        self._learned: dict[tuple, Hashable] = {}

    def __call__(
        self, memory: Hashable, step: int, rounds: tuple[DraftedRound | None, ...]
    ) -> tuple[tuple[int, ...], Hashable]:
        present = tuple(r for r, drafted in enumerate(rounds) if drafted is not None)
        confidences = tuple(self._confidences(r, *rounds[r]) for r in present)
        judged = tuple(0 if self.judges is None else self.judges(r, *rounds[r]) for r in present)
        key = (memory, step, present, confidences, judged)
        if key not in self._decided:
            lengths_R, remembers = self._decide(memory, step, present, confidences, judged)
            length_of = dict(zip(present, lengths_R, strict=True))
            self._decided[key] = tuple(length_of.get(r, 0) for r in range(len(rounds))), remembers
        return self._decided[key]

    def _confidences(self, request: int, prefix: Tokens, block: Tokens) -> tuple[float, ...]:
        shift = 1 if self.sees_own_token else 0
        return tuple(self.confidence(request, prefix, block[: k + shift]) for k in range(len(block)))

    def decisions(self) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        """All that each decision was made from, except for what has been learned from acceptances; and its lengths."""
        for (memory, *rest), (lengths, _) in self._decided.items():
            survivals = None if memory is None else tuple(known and known[:-1] for known in memory)
            yield (survivals, *rest), lengths

    def learns(self, memory: Hashable, accepted: tuple[int | None, ...]) -> Hashable:
        """What became of the step's drafts, which ``memory`` ends with."""
        key = (memory, accepted)
        if key not in self._learned:
            before, drafted = memory
            drafts, lengths_R = None, None
            if drafted is not None:
                step, ids, lengths, rows, verified = drafted
                drafts = Drafts(
                    step=step, request_ids_R=np.array(ids), lengths_R=np.array(lengths), confidences_RG=np.array(rows)
                )
                lengths_R = np.array(verified)
            accepted_R = np.array([count for count in accepted if count is not None])
            self._learned[key] = memory_of(remembered(before).after(drafts, lengths_R, accepted_R))
        return self._learned[key]

    def _decide(
        self, memory, step: int, present: tuple[int, ...], confidences, judged: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Hashable]:
        history = remembered(memory)
        batch = StepBatch(
            step=step,
            request_ids_R=np.array(present),
            draftable_R=np.array([len(row) for row in confidences]),
            context_tokens=0,
            prefill_tokens=self.prefill_tokens,
            token_limit=self.token_limit,
        )
        plan = self.policy.plan(batch, history.past, self.cost)
        if not plan.drafts:
            self.seen[plan.why, plan.budget, (0,) * len(present)] += 1
            return (0,) * len(present), (memory, None)
        confidences_RG = np.zeros((len(present), max(map(len, confidences))))
        for row, values in enumerate(confidences):
            confidences_RG[row, : len(values)] = values
        drafts = Drafts(
            step=step,
            request_ids_R=batch.request_ids_R,
            lengths_R=plan.draft_lengths_R,
            confidences_RG=confidences_RG,
        )
        if self.judges is not None:
            correction = Correction().after(drafts, plan.draft_lengths_R, np.minimum(judged, plan.draft_lengths_R))
            plan = replace(plan, log_odds_R=correction.log_odds_of(plan.batch.request_ids_R))
        lengths = tuple(self.policy.verify_lengths(plan, drafts, self.cost).tolist())
        self.seen[plan.why, plan.budget, lengths] += 1
        rows = tuple(map(tuple, confidences_RG.tolist()))
        return lengths, (memory, (step, present, tuple(plan.draft_lengths_R.tolist()), rows, lengths))


def memory_of(history: History) -> Hashable:
    """What a history knows, as something that equal histories have in common."""
    return _of(history.past), _of(history.last)


def remembered(memory) -> History:
    """The history that ``memory_of`` was made of."""
    past, last = memory or (None, None)
    return History(past=_past(past), last=_past(last))


def past_of(step: int, survivals: list[list[float]]) -> History:
    """A history of full blocks, before anything that is enumerated."""
    rows = np.array(survivals)
    lengths_R = np.full(len(rows), rows.shape[1])
    return History(
        past=PastSurvivals(
            step=step,
            request_ids_R=np.arange(len(rows)),
            lengths_R=lengths_R,
            survivals_RG=rows,
            is_new_R=np.ones(len(rows), bool),
        )
    )


def _of(past: PastSurvivals | None) -> Hashable:
    if past is None:
        return None
    rows = tuple(map(tuple, past.survivals_RG.tolist()))
    known = past.correction
    correction = (
        *(tuple(values.tolist()) for values in (known.request_ids_R, known.own_R, known.own_information_R)),
        known.shared,
        known.shared_information,
    )
    return (
        past.step,
        tuple(past.request_ids_R.tolist()),
        tuple(past.lengths_R.tolist()),
        rows,
        tuple(past.is_new_R.tolist()),
        past.is_followed,
        correction,
    )


def _past(values) -> PastSurvivals | None:
    if values is None:
        return None
    step, ids, lengths, rows, is_new, is_followed, (learned_ids, own, information, shared, shared_information) = values
    return PastSurvivals(
        step=step,
        request_ids_R=np.array(ids),
        lengths_R=np.array(lengths),
        survivals_RG=np.array(rows),
        is_new_R=np.array(is_new, bool),
        is_followed=is_followed,
        correction=Correction(
            request_ids_R=np.array(learned_ids, int),
            own_R=np.array(own),
            own_information_R=np.array(information),
            shared=shared,
            shared_information=shared_information,
        ),
    )

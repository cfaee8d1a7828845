"""The policies: whether a step drafts, and how much of the drafts it verifies.

A policy decides twice. ``plan`` comes before drafting and sees the batch, survivals of at least two steps ago and the
cost: nothing of the step's drafts exists yet. ``verify_lengths`` comes after drafting and sees how sure the drafter is,
never a drafted token. Both are functions of their arguments, so a recorded step can be replayed.

=========== ============== ======================================= ==================================================
policy      drafts         verifies                                source
=========== ============== ======================================= ==================================================
off         never          nothing                                 the baseline
fixed:k     always k       everything                              the usual static length
threshold:c always         up to the first c_k below c             the static threshold of section 4
immediate   if it pays     K by Algorithm 1, current survivals     section 3.2.2
delayed     if it pays     K by the global maximum, survivals of   section 5.2
                           two steps ago; the current ones rank
=========== ============== ======================================= ==================================================

``immediate`` and ``delayed`` go by survivals that are corrected by what became of earlier drafts (`Correction`).
All keep the output distribution under every acceptance rule (tests/properties/test_scheduling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import numpy as np

from dspark.scheduling.admission import (
    Stop,
    best_draft,
    first_stop,
    global_maximum,
    ranked_survivals,
    throughput,
    verify_lengths,
)
from dspark.scheduling.batch import BoolArray, Drafts, FloatArray, IntArray, StepBatch, frozen_floats, frozen_ints
from dspark.scheduling.correction import corrected_survivals
from dspark.scheduling.cost import StepCost, StepSeconds
from dspark.scheduling.history import DELAY_STEPS, PastSurvivals

__all__ = [
    "POLICIES",
    "Delayed",
    "Fixed",
    "Immediate",
    "Off",
    "Policy",
    "StepPlan",
    "Threshold",
    "Why",
    "parse_policy",
    "predicted_seconds",
]

Why = Literal["always", "pays", "newcomer", "no history", "probe", "parked", "nothing to draft"]
"""Why a step drafts or not: always (or never), by policy; it pays, by the survivals of the past; it may pay for those
of whom little is known, and is done for them alone; no survivals are known yet; it does not pay but is tried again; it
does not pay; no request can use a draft."""

_LONGEST = 2**31 - 1
_LOOK_EVERY_STEPS = 8
"""Where the same requests were not worth a draft, and nothing new is known of them, it is looked at again after so many
steps: what changed is their contexts alone."""
_HOPE = 0.1
"""Whose log-odds optimism still raises by more is a newcomer: fewer than some ten of its tokens were verified."""
_LEAST_VERIFIED: Mapping[Why, int] = {"probe": 8, "newcomer": 2}
"""So many tokens are verified at least: what confidences promise too little of would else never be drafted again."""
_PROBED_REQUESTS = 8
"""A probe drafts for so many at most: of the others the drafter need not even read the context for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """What is settled before drafting.

    Attributes:
        batch: the step.
        draft_lengths_R: tokens to draft for each request.
        budget: draft tokens to verify at most, if settled already (delayed); None if the current survivals say.
        log_odds_R: by how much the log-odds of each request's confidences are corrected (`Correction`); None: not at
            all.
        why: it drafts or does not.
    """

    batch: StepBatch
    draft_lengths_R: IntArray
    budget: int | None = None
    log_odds_R: FloatArray | None = None
    why: Why

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_lengths_R", frozen_ints(self.draft_lengths_R))
        if self.log_odds_R is not None:
            object.__setattr__(self, "log_odds_R", frozen_floats(self.log_odds_R))

    @property
    def drafts(self) -> bool:
        """Whether the drafter runs."""
        return any(self.draft_lengths_R.tolist())


class Policy(Protocol):
    """Decides about a step, before and after drafting."""

    @property
    def name(self) -> str:
        """As ``parse_policy`` reads it."""
        ...

    @property
    def needs_confidences(self) -> bool:
        """Whether it can only be used with a drafter that says how sure it is."""
        ...

    @property
    def needs_cost(self) -> bool:
        """Whether it has to know what steps cost; the others are given None where nothing was measured."""
        ...

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Whether and how long to draft, from the past alone (``History.past``)."""
        ...

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """Draft tokens of each request to verify, [R]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Off:
    """No speculation."""

    needs_confidences: ClassVar[bool] = False
    needs_cost: ClassVar[bool] = False
    name: str = field(default="off", init=False)

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Drafts nothing."""
        return StepPlan(batch=batch, draft_lengths_R=np.zeros_like(batch.draftable_R), why="always")

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """Nothing."""
        return np.zeros_like(plan.draft_lengths_R)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Draft and verify ``length`` tokens of every request, as far as it can use them and the token limit lets."""

    needs_confidences: ClassVar[bool] = False
    needs_cost: ClassVar[bool] = False
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.length <= _LONGEST:
            raise ValueError(f"length of policy fixed must be 0 to {_LONGEST}, got {self.length}")

    @property
    def name(self) -> str:
        """``fixed:k``."""
        return f"fixed:{self.length}"

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Always drafts."""
        return StepPlan(batch=batch, draft_lengths_R=np.minimum(batch.draftable_R, self.length), why="always")

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """All; under a token limit by position, then request slot. Needs no confidences."""
        _check(plan, drafts)
        alike_RG = np.ones((drafts.lengths_R.size, int(drafts.lengths_R.max(initial=0))))
        return verify_lengths(alike_RG, drafts.lengths_R, plan.batch.most_verified(drafts.num_drafted))


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Verify a draft up to its first token whose confidence is below ``confidence`` (section 4), whatever the load."""

    needs_confidences: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = False
    confidence: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence <= 1.0:
            raise ValueError(f"confidence of policy threshold must be a probability, 0 to 1, got {self.confidence}")

    @property
    def name(self) -> str:
        """``threshold:c``."""
        return f"threshold:{self.confidence:g}"

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Always drafts."""
        return StepPlan(batch=batch, draft_lengths_R=batch.draftable_R, why="always")

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """Up to the first below; under a token limit the largest survivals of these."""
        _check(plan, drafts)
        survivals_RG, confidences_RG = drafts.survivals_RG, drafts.confidences_RG
        assert confidences_RG is not None  # survivals_RG has refused that
        is_sure_RG = np.logical_and.accumulate(confidences_RG >= self.confidence, axis=1)
        lengths_R = np.minimum(is_sure_RG.sum(axis=1), drafts.lengths_R)
        return verify_lengths(survivals_RG, lengths_R, plan.batch.most_verified(int(lengths_R.sum())))


@dataclass(frozen=True, kw_only=True)
class Immediate:
    """Algorithm 1: by current survivals, stopping at the first admission that does not raise Theta.

    Attributes:
        probe_every_steps: where drafting does not pay, it is tried again each time the last survivals have become this
            many steps older.
    """

    needs_confidences: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = True
    probe_every_steps: int = 128
    name: str = field(default="immediate", init=False)

    def __post_init__(self) -> None:
        _check_probing(self.probe_every_steps)

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Drafts if Algorithm 1 on past survivals would beat not drafting; settles no budget."""
        plan = _plan(batch, past, _known(cost, self.name), first_stop, self.probe_every_steps)
        return replace(plan, budget=None)

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """By Algorithm 1."""
        return _verify_lengths(plan, drafts, _known(cost, self.name))


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """Section 5.2: as many as was best two steps ago, on any cost curve; the current survivals say which.

    While no survivals of two steps ago are known (the first two drafting steps), it goes by Algorithm 1;
    ``StepPlan.why`` is then ``no history``.

    Attributes:
        probe_every_steps: as of ``Immediate``.
    """

    needs_confidences: ClassVar[bool] = True
    needs_cost: ClassVar[bool] = True
    probe_every_steps: int = 128
    name: str = field(default="delayed", init=False)

    def __post_init__(self) -> None:
        _check_probing(self.probe_every_steps)

    def plan(self, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
        """Settles the budget K; drafts if it beats not drafting."""
        return _plan(batch, past, _known(cost, self.name), global_maximum, self.probe_every_steps)

    def verify_lengths(self, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
        """The K largest current survivals."""
        return _verify_lengths(plan, drafts, _known(cost, self.name))


def _plan(batch: StepBatch, past: PastSurvivals | None, cost: StepCost, stop: Stop, probe_every_steps: int) -> StepPlan:
    """Draft as long as pays by past survivals, corrected by outcomes; not at all if no draft has the larger Theta."""
    age_steps = past.age(batch) if past is not None else 0
    if not batch.draftable_R.any():
        return StepPlan(batch=batch, draft_lengths_R=np.zeros_like(batch.draftable_R), why="nothing to draft")
    if past is None:
        return StepPlan(batch=batch, draft_lengths_R=batch.draftable_R, why="no history")
    is_probe = age_steps % probe_every_steps == 0
    if (
        age_steps > DELAY_STEPS
        and not past.is_followed
        and age_steps % _LOOK_EVERY_STEPS != 0
        and not is_probe
        and past.is_of_the_requests_of(batch)
    ):
        return StepPlan(batch=batch, draft_lengths_R=np.zeros_like(batch.draftable_R), why="parked")
    expected_RG = past.expected_for(batch)
    log_odds_R = past.correction.log_odds_of(batch.request_ids_R)
    survivals_RG = corrected_survivals(expected_RG, log_odds_R)
    best = best_draft(survivals_RG, batch, cost, stop)
    if best.pays:
        known_R = past.correction.log_odds_of(batch.request_ids_R, optimism=0.0)
        is_new_R = (log_odds_R - known_R > _HOPE) & (batch.draftable_R > 0)
        if is_new_R.any() and not best_draft(corrected_survivals(expected_RG, known_R), batch, cost, stop).pays:
            # It pays by hope alone: what newcomers are like shows without drafts for the others.
            draftable_R = np.where(is_new_R, batch.draftable_R, 0)
            alone = best_draft(survivals_RG, replace(batch, draftable_R=draftable_R), cost, stop)
            return StepPlan(
                batch=batch,
                draft_lengths_R=np.minimum(draftable_R, alone.length + 1),
                budget=max(alone.budget, _least_verified("newcomer", batch)),
                log_odds_R=log_odds_R,
                why="newcomer",
            )
        # One more than pays: what its survival is has to be known if it is to be drafted again one day.
        lengths_R = np.minimum(batch.draftable_R, best.length + 1)
        return StepPlan(batch=batch, draft_lengths_R=lengths_R, budget=best.budget, log_odds_R=log_odds_R, why="pays")
    if is_probe:
        lengths_R = np.where(_probed(batch, past, probe_every_steps), batch.draftable_R, 0)
        budget = max(best.budget, _least_verified("probe", batch))
        return StepPlan(batch=batch, draft_lengths_R=lengths_R, budget=budget, log_odds_R=log_odds_R, why="probe")
    return StepPlan(batch=batch, draft_lengths_R=np.zeros_like(batch.draftable_R), why="parked")


def _probed(batch: StepBatch, past: PastSurvivals, probe_every_steps: int) -> BoolArray:
    """Whom a probe drafts for: half of them of the last draft's, whose contexts are read already, the others by turns.

    By their numbers, the newest first: an order that says nothing of their texts.
    """
    last = set(past.request_ids_R[past.is_new_R].tolist())
    ids = batch.request_ids_R.tolist()
    rows = sorted(np.flatnonzero(batch.draftable_R).tolist(), key=lambda row: -ids[row])
    known, others = [row for row in rows if ids[row] in last], [row for row in rows if ids[row] not in last]
    num_others = min(len(others), max(_PROBED_REQUESTS // 2, _PROBED_REQUESTS - len(known)))
    turn = batch.step // probe_every_steps * num_others % max(len(others), 1)
    is_probed_R = np.zeros(batch.num_requests, np.bool_)
    is_probed_R[(others[turn:] + others[:turn])[:num_others]] = True
    is_probed_R[known[: _PROBED_REQUESTS - num_others]] = True
    return is_probed_R


def _least_verified(why: Why, batch: StepBatch) -> int:
    """Draft tokens to verify at least, as far as the token limit lets."""
    return batch.most_verified(_LEAST_VERIFIED.get(why, 0))


def _verify_lengths(plan: StepPlan, drafts: Drafts, cost: StepCost) -> IntArray:
    """The largest corrected current survivals: as many as the budget says, or Algorithm 1 if none is settled."""
    _check(plan, drafts)
    survivals_RG, budget = drafts.survivals_RG, plan.budget
    if plan.log_odds_R is not None:
        survivals_RG = corrected_survivals(survivals_RG, plan.log_odds_R)
    if budget is None:
        budget = first_stop(_theta(survivals_RG, drafts.lengths_R, plan.batch, cost))
        budget = max(budget, _least_verified(plan.why, plan.batch))
    return verify_lengths(survivals_RG, drafts.lengths_R, min(budget, drafts.num_drafted))


def _theta(survivals_RG: FloatArray, lengths_R: IntArray, batch: StepBatch, cost: StepCost) -> FloatArray:
    """Theta(K) of a step that drafts ``lengths_R``, for as many K as the token limit lets."""
    ranked_N = ranked_survivals(survivals_RG, lengths_R)
    return throughput(ranked_N[: batch.most_verified(ranked_N.size)], batch, lengths_R, cost)


def predicted_seconds(plan: StepPlan, num_verified: int, cost: StepCost) -> StepSeconds:
    """Seconds of the planned step with ``num_verified`` draft tokens, prompt tokens included."""
    batch, lengths = plan.batch, plan.draft_lengths_R.tolist()
    verify_K = cost.verify_seconds_up_to(
        num_verified,
        requests=batch.num_requests,
        context_tokens=batch.context_tokens,
        prefill_tokens=batch.prefill_tokens,
    )
    return StepSeconds(
        draft=cost.draft_seconds(sum(length > 0 for length in lengths), max(lengths, default=0)),
        schedule=cost.schedule_seconds if plan.drafts else 0.0,
        verify=float(verify_K[-1]) + cost.prefill_seconds(batch.prefill_tokens),
        added=float(verify_K[-1] - verify_K[0]),
    )


def _check(plan: StepPlan, drafts: Drafts) -> None:
    drafted_ids_R, planned_ids_R = drafts.request_ids_R, plan.batch.request_ids_R
    is_same = drafted_ids_R is planned_ids_R or np.array_equal(drafted_ids_R, planned_ids_R)
    if drafts.step != plan.batch.step or not is_same:
        raise ValueError(f"drafts of step {drafts.step} are not those of the planned step {plan.batch.step}")
    lengths = zip(drafts.lengths_R.tolist(), plan.draft_lengths_R.tolist(), strict=True)
    if any(drafted > planned for drafted, planned in lengths):
        raise ValueError("drafts are longer than planned: lengths_R must not exceed draft_lengths_R of the plan")


def _known(cost: StepCost | None, policy: str) -> StepCost:
    if cost is None:
        raise ValueError(
            f"policy {policy} needs to know what steps cost here: give a cost (`dspark profile` measures it)"
        )
    return cost


def _check_probing(probe_every_steps: int) -> None:
    if probe_every_steps < 1:
        raise ValueError(f"probe_every_steps must be at least 1, got {probe_every_steps}")


POLICIES: Mapping[str, Callable[[str], Policy]] = {
    "off": lambda argument: Off(),
    "fixed": lambda argument: Fixed(length=int(argument)),
    "threshold": lambda argument: Threshold(confidence=float(argument)),
    "immediate": lambda argument: Immediate(),
    "delayed": lambda argument: Delayed(),
}
"""Name -> policy, from what follows the name's colon."""


def parse_policy(text: str) -> Policy:
    """The policy that ``off``, ``fixed:4``, ``threshold:0.6``, ``immediate`` or ``delayed`` names.

    Raises:
        ValueError: it names none, its number is missing, wrong or too much.
    """
    name, colon, argument = text.partition(":")
    takes_number = name in ("fixed", "threshold")
    if name not in POLICIES or takes_number is not bool(colon):
        raise ValueError(f"policy {text!r} is unknown: off, fixed:K, threshold:C, immediate or delayed")
    try:
        return POLICIES[name](argument)
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}") from error

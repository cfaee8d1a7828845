"""Requests that go by a policy of their own, in one batch with those that go by the engine's.

Only policies that look at nothing but the request itself can be a request's own (``off``, ``fixed:K``,
``threshold:C``): the others weigh the whole batch. What such requests draft counts for the rest as tokens that are in
the step anyway, as those of prompts do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dspark.scheduling.batch import BoolArray, Drafts, IntArray, StepBatch
from dspark.scheduling.cost import StepCost
from dspark.scheduling.history import PastSurvivals
from dspark.scheduling.policies import Fixed, Off, Policy, StepPlan, Threshold, parse_policy

__all__ = ["choose_lengths", "parse_own_policy", "plan_step"]


@lru_cache(maxsize=256)
def parse_own_policy(text: str) -> Policy:
    """The policy that a request may bring.

    Raises:
        ValueError: it names none, or one that weighs the whole batch.
    """
    policy = parse_policy(text)
    if not isinstance(policy, Off | Fixed | Threshold):
        raise ValueError(f"policy {text!r} weighs all requests together: give off, fixed:K or threshold:C")
    return policy


def plan_step(policy: Policy, batch: StepBatch, past: PastSurvivals | None, cost: StepCost | None) -> StepPlan:
    """``Policy.plan``, for a batch some of whose requests may have a policy of their own."""
    if batch.own_policies_R is None:
        return policy.plan(batch, past, cost)
    lengths_R = np.zeros_like(batch.draftable_R)
    for own, is_its_R in _groups(batch):
        lengths_R += own.plan(_only(batch, is_its_R), past, cost).draft_lengths_R
    rest = replace(_only(batch, ~_has_own(batch)), prefill_tokens=batch.prefill_tokens + int(lengths_R.sum()))
    plan = policy.plan(rest, past, cost)
    return replace(plan, batch=batch, draft_lengths_R=plan.draft_lengths_R + lengths_R)


def choose_lengths(policy: Policy, plan: StepPlan, drafts: Drafts, cost: StepCost | None) -> IntArray:
    """``Policy.verify_lengths``, for a plan of ``plan_step``."""
    batch = plan.batch
    if batch.own_policies_R is None:
        return policy.verify_lengths(plan, drafts, cost)
    lengths_R = np.zeros_like(plan.draft_lengths_R)
    for own, is_its_R in _groups(batch):
        lengths_R += own.verify_lengths(*_part(plan, drafts, is_its_R), cost)
    rest, its_drafts = _part(plan, drafts, ~_has_own(batch))
    rest = replace(rest, batch=replace(rest.batch, prefill_tokens=rest.batch.prefill_tokens + int(lengths_R.sum())))
    return lengths_R + policy.verify_lengths(rest, its_drafts, cost)


def _has_own(batch: StepBatch) -> BoolArray:
    assert batch.own_policies_R is not None, "asked for a batch that has some"
    return np.array([name is not None for name in batch.own_policies_R], bool)


def _groups(batch: StepBatch) -> Iterator[tuple[Policy, BoolArray]]:
    """Each policy of requests' own, and whose it is."""
    assert batch.own_policies_R is not None, "asked for a batch that has some"
    for name in dict.fromkeys(name for name in batch.own_policies_R if name is not None):
        yield parse_own_policy(name), np.array([other == name for other in batch.own_policies_R], bool)


def _only(batch: StepBatch, is_in_R: BoolArray) -> StepBatch:
    """The batch, in which the others cannot draft."""
    return replace(batch, draftable_R=np.where(is_in_R, batch.draftable_R, 0), own_policies_R=None)


def _part(plan: StepPlan, drafts: Drafts, is_in_R: BoolArray) -> tuple[StepPlan, Drafts]:
    """The plan and the drafts, as if the others had none."""
    batch = _only(plan.batch, is_in_R)
    part = replace(plan, batch=batch, draft_lengths_R=np.where(is_in_R, plan.draft_lengths_R, 0))
    return part, replace(drafts, lengths_R=np.where(is_in_R, drafts.lengths_R, 0))

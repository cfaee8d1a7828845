"""How much of each draft is verified: survival, the prefix scheduler, policies, and what a step costs.

Functions over numbers; nothing here draws, times or stores anything. A step of the engine, or of the simulator, is::

    plan = plan_step(policy, batch, history.past, cost)          # before drafting, from the past alone
    drafts = ...                                                 # draft plan.draft_lengths_R, if plan.drafts
    lengths_R = choose_lengths(policy, plan, drafts, cost)       # sees confidences, no token
    history = history.after(drafts, lengths_R, accepted_R)       # with None if nothing was drafted
    cost = cost.corrected(predicted, measured)                   # once the step has been timed
"""

from __future__ import annotations

from dspark.scheduling.batch import Drafts, StepBatch, survival
from dspark.scheduling.correction import Correction
from dspark.scheduling.cost import DraftPoint, PrefillPoint, StepCost, StepSeconds, VerifyPoint
from dspark.scheduling.curve import MeasuredCurve, measure_curve
from dspark.scheduling.history import History, PastSurvivals
from dspark.scheduling.own import choose_lengths, parse_own_policy, plan_step
from dspark.scheduling.policies import (
    Delayed,
    Fixed,
    Immediate,
    Off,
    Policy,
    StepPlan,
    Threshold,
    parse_policy,
    predicted_seconds,
)
from dspark.scheduling.record import StepRecord, replayed_lengths
from dspark.scheduling.rehearsal import rehearse

__all__ = [
    "Correction",
    "Delayed",
    "DraftPoint",
    "Drafts",
    "Fixed",
    "History",
    "Immediate",
    "MeasuredCurve",
    "Off",
    "PastSurvivals",
    "Policy",
    "PrefillPoint",
    "StepBatch",
    "StepCost",
    "StepPlan",
    "StepRecord",
    "StepSeconds",
    "Threshold",
    "VerifyPoint",
    "choose_lengths",
    "measure_curve",
    "parse_own_policy",
    "parse_policy",
    "plan_step",
    "predicted_seconds",
    "rehearse",
    "replayed_lengths",
    "survival",
]

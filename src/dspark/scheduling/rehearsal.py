"""Made-up steps, so that no real one waits for compiled code to be made or to be read from the disk."""

from __future__ import annotations

import numpy as np

from dspark.scheduling import compiled
from dspark.scheduling.batch import Drafts, StepBatch, frozen_floats, frozen_ints
from dspark.scheduling.cost import StepCost
from dspark.scheduling.history import DELAY_STEPS, History
from dspark.scheduling.own import choose_lengths, plan_step
from dspark.scheduling.policies import Policy, predicted_seconds

__all__ = ["rehearse"]


def rehearse(policy: Policy, cost: StepCost | None) -> None:
    """Decide some steps as the engine does."""
    history, ids_R = History(), frozen_ints([0, 1])
    for step in range(DELAY_STEPS + 1):
        batch = StepBatch(step=step, request_ids_R=ids_R, draftable_R=frozen_ints([2, 1]), context_tokens=2)
        plan = plan_step(policy, batch, history.past, cost)
        width = int(plan.draft_lengths_R.max())
        confidences_RG = np.empty((2, width))
        compiled.confidences(
            np.zeros((2, width), np.float32), frozen_floats(np.ones((2, width))), ids_R, confidences_RG
        )
        drafts = Drafts(step=step, request_ids_R=ids_R, lengths_R=plan.draft_lengths_R, confidences_RG=confidences_RG)
        lengths_R = choose_lengths(policy, plan, drafts, cost)
        if cost is not None:
            predicted_seconds(plan, int(lengths_R.sum()), cost)
        history = history.after(drafts, lengths_R, np.zeros_like(lengths_R))

"""What one step was: enough to decide it again, here or in a simulator, and to see how good the prediction was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark.scheduling.batch import Drafts, IntArray, StepBatch, frozen_floats, frozen_ints
from dspark.scheduling.cost import StepCost, StepSeconds
from dspark.scheduling.history import History
from dspark.scheduling.own import choose_lengths, plan_step
from dspark.scheduling.policies import Policy, StepPlan, Why

__all__ = ["StepRecord", "replayed_lengths"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """One step as it was planned, drafted, scheduled and timed.

    Attributes:
        policy: its name.
        plan: with the batch.
        drafts: None if the step did not draft.
        verify_lengths_R: draft tokens verified.
        predicted: seconds, as the cost gave them when the lengths were chosen; None where no cost is known.
        measured: seconds; None before the step is over, or in a simulation.
        accepted_R: draft tokens accepted; None before the step is over.
    """

    policy: str
    plan: StepPlan
    drafts: Drafts | None
    verify_lengths_R: IntArray
    predicted: StepSeconds | None
    measured: StepSeconds | None = None
    accepted_R: IntArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify_lengths_R", frozen_ints(self.verify_lengths_R))
        self._check_size("verify_lengths_R", self.verify_lengths_R.shape)
        if self.accepted_R is not None:
            object.__setattr__(self, "accepted_R", frozen_ints(self.accepted_R))
            self._check_size("accepted_R", self.accepted_R.shape)
            accepted_and_verified = zip(self.accepted_R.tolist(), self.verify_lengths_R.tolist(), strict=True)
            if any(accepted > verified for accepted, verified in accepted_and_verified):
                raise ValueError("accepted_R exceeds verify_lengths_R: only what is verified can be accepted")

    def _check_size(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != self.plan.batch.request_ids_R.shape:
            raise ValueError(
                f"{name} has shape {shape}: give one number for each of the batch's {self.plan.batch.num_requests} "
                "requests"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, for a JSON line."""
        batch, drafts = self.plan.batch, self.drafts
        return {
            "policy": self.policy,
            "step": batch.step,
            "request_ids": batch.request_ids_R.tolist(),
            "draftable": batch.draftable_R.tolist(),
            "context_tokens": batch.context_tokens,
            "prefill_tokens": batch.prefill_tokens,
            "token_limit": batch.token_limit,
            "own_policies": batch.own_policies_R,
            "draft_lengths": self.plan.draft_lengths_R.tolist(),
            "budget": self.plan.budget,
            "log_odds": None if self.plan.log_odds_R is None else self.plan.log_odds_R.tolist(),
            "why": self.plan.why,
            "drafted": None if drafts is None else drafts.lengths_R.tolist(),
            "confidences": None if drafts is None or drafts.confidences_RG is None else _rows(drafts),
            "verified": self.verify_lengths_R.tolist(),
            "accepted": None if self.accepted_R is None else self.accepted_R.tolist(),
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "measured": None if self.measured is None else asdict(self.measured),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        """What ``as_dict`` gave."""
        ids_R = frozen_ints(values["request_ids"])
        batch = StepBatch(
            step=values["step"],
            request_ids_R=ids_R,
            draftable_R=frozen_ints(values["draftable"]),
            context_tokens=values["context_tokens"],
            prefill_tokens=values["prefill_tokens"],
            token_limit=values["token_limit"],
            own_policies_R=None if values.get("own_policies") is None else tuple(values["own_policies"]),
        )
        why: Why = values["why"]
        log_odds = values.get("log_odds")
        plan = StepPlan(
            batch=batch,
            draft_lengths_R=frozen_ints(values["draft_lengths"]),
            budget=values["budget"],
            log_odds_R=None if log_odds is None else frozen_floats(log_odds),
            why=why,
        )
        return cls(
            policy=values["policy"],
            plan=plan,
            drafts=None if values["drafted"] is None else _drafts(batch, values["drafted"], values["confidences"]),
            verify_lengths_R=frozen_ints(values["verified"]),
            predicted=None if values["predicted"] is None else StepSeconds(**values["predicted"]),
            measured=None if values["measured"] is None else StepSeconds(**values["measured"]),
            accepted_R=None if values["accepted"] is None else frozen_ints(values["accepted"]),
        )


def replayed_lengths(records: Iterable[StepRecord], policy: Policy, cost: StepCost) -> list[IntArray]:
    """The lengths that ``policy`` chooses in the recorded steps, in order, from what was drafted in them.

    The batches are taken as they were, so for another policy or cost this tells of single decisions; how a run would
    have gone on is for the simulator to say. The cost stays as given: pass one without correction for exact agreement.
    A step that the policy does not draft in verifies nothing, as does one that was recorded without drafts.
    """
    history = History()
    lengths = []
    for record in records:
        plan = plan_step(policy, record.plan.batch, history.past, cost)
        drafts = record.drafts if plan.drafts else None
        none_R = np.zeros_like(plan.draft_lengths_R)
        lengths.append(none_R if drafts is None else choose_lengths(policy, plan, _cut(drafts, plan), cost))
        history = history.after(record.drafts, record.verify_lengths_R, record.accepted_R)
    return lengths


def _cut(drafts: Drafts, plan: StepPlan) -> Drafts:
    """The drafts, no longer than planned."""
    return Drafts(
        step=drafts.step,
        request_ids_R=drafts.request_ids_R,
        lengths_R=np.minimum(drafts.lengths_R, plan.draft_lengths_R),
        confidences_RG=drafts.confidences_RG,
    )


def _rows(drafts: Drafts) -> list[list[float]]:
    assert drafts.confidences_RG is not None
    rows = zip(drafts.confidences_RG.tolist(), drafts.lengths_R.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def _drafts(batch: StepBatch, lengths: list[int], rows: list[list[float]] | None) -> Drafts:
    confidences_RG = None
    if rows is not None:
        confidences_RG = np.zeros((len(rows), max(map(len, rows), default=0)))
        for row, values in enumerate(rows):
            confidences_RG[row, : len(values)] = values
    return Drafts(
        step=batch.step,
        request_ids_R=batch.request_ids_R,
        lengths_R=frozen_ints(lengths),
        confidences_RG=confidences_RG,
    )

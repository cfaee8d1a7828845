"""Survivals of earlier steps and what became of them: all that a decision before drafting may look at (section 5.2).

A ``PastSurvivals`` is made in the step it tells of. ``History`` gives it out two steps later, so the budget of a step
can be settled while the step before it still runs, and cannot depend on any token of the step itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dspark.scheduling import compiled
from dspark.scheduling.batch import (
    BoolArray,
    Drafts,
    FloatArray,
    IntArray,
    StepBatch,
    frozen,
    frozen_floats,
    frozen_ints,
)
from dspark.scheduling.correction import Correction

__all__ = ["DELAY_STEPS", "History", "PastSurvivals"]

DELAY_STEPS = 2
"""A budget comes from confidences at least this many steps older (section 5.2)."""
_NEWEST = 0.15
"""Weight of a step's survivals in a request's average. Those of one step say little of the next ones of a single
request: a few requests would stop drafting at the first unsure block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PastSurvivals:
    """Survivals of a step that is over, averaged with those of the steps before (`averaged_with`).

    Attributes:
        step: in which the newest were made.
        request_ids_R: whose row it is.
        lengths_R: tokens of each request's last draft; 0 if there was none since it came.
        survivals_RG: a_k as the drafter's confidences give them; 0 behind a request's length.
        is_new_R: whether the request was drafted for in ``step``.
        correction: what has been learned of such survivals from the outcomes up to that step.
        is_followed: whether the step before this decision drafted, too, so that newer survivals are on their way.
    """

    step: int
    request_ids_R: IntArray
    lengths_R: IntArray
    survivals_RG: FloatArray
    is_new_R: BoolArray
    correction: Correction = field(default_factory=Correction)
    is_followed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_ids_R", frozen_ints(self.request_ids_R))
        object.__setattr__(self, "lengths_R", frozen_ints(self.lengths_R))
        object.__setattr__(self, "survivals_RG", frozen_floats(self.survivals_RG))

    def age(self, batch: StepBatch) -> int:
        """Steps from these survivals to ``batch``.

        Raises:
            ValueError: fewer than ``DELAY_STEPS``.
        """
        age = batch.step - self.step
        if age < DELAY_STEPS:
            raise ValueError(
                f"survivals of step {self.step} must not decide about step {batch.step}: "
                f"they have to be {DELAY_STEPS} steps old (use History.past)"
            )
        return age

    def expected_for(self, batch: StepBatch) -> FloatArray:
        """Survivals [R, G] to expect for the requests of a later step, 0 behind ``batch.draftable_R``.

        A request that was there keeps its own; one that joined since gets the mean of the others at each position, and
        so does a position that the request had not drafted. What no request had drafted is expected to fail (0).
        Outcomes are not in it (`Correction`).
        """
        expected_RG = np.empty((batch.num_requests, int(batch.draftable_R.max(initial=0))))
        compiled.expected(
            self.request_ids_R, self.lengths_R, self.survivals_RG, batch.request_ids_R, batch.draftable_R, expected_RG
        )
        return frozen(expected_RG)

    def is_of_the_requests_of(self, batch: StepBatch) -> bool:
        """Whether the same requests were there, and no others."""
        return set(batch.request_ids_R.tolist()) == set(self.request_ids_R.tolist())

    def averaged_with(self, drafts: Drafts) -> tuple[IntArray, FloatArray]:
        """Survivals of ``drafts``, averaged with these of the steps before: the newest count most; and their lengths.

        Requests that were not drafted for keep what is known of them.
        """
        width = max(int(drafts.lengths_R.max(initial=0)), self.survivals_RG.shape[1])
        averaged_RG, averaged_lengths_R = np.empty((drafts.request_ids_R.size, width)), drafts.lengths_R.copy()
        compiled.moved_average(
            self.request_ids_R, self.lengths_R, self.survivals_RG,
            drafts.request_ids_R, drafts.lengths_R, drafts.survivals_RG, _NEWEST, averaged_RG, averaged_lengths_R,
        )  # fmt: skip
        return frozen(averaged_lengths_R), frozen(averaged_RG)


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """The survivals between two steps.

    Attributes:
        past: the newest that are ``DELAY_STEPS`` old when the next step begins, if there are any. They stay while
            nothing is drafted.
        last: those of the step that has just ended, which no decision sees yet.
    """

    past: PastSurvivals | None = None
    last: PastSurvivals | None = None

    @property
    def correction(self) -> Correction:
        """All that has been learned so far, for statistics: decisions wait for it as for survivals."""
        newest = self.last or self.past
        return Correction() if newest is None else newest.correction

    def after(
        self, drafts: Drafts | None, verified_R: IntArray | None = None, accepted_R: IntArray | None = None
    ) -> History:
        """The history once a step with these drafts is over; None (or drafts without confidences) if none were made.

        Args:
            verified_R, accepted_R: what became of the drafts; nothing is learned of it where it is not given.
        """
        before, made = self.last or self.past, None
        if drafts is not None and drafts.confidences_RG is not None and drafts.num_drafted > 0:
            correction = self.correction
            if verified_R is not None and accepted_R is not None:
                correction = correction.after(drafts, verified_R, accepted_R)
            lengths_R, survivals_RG = drafts.lengths_R, drafts.survivals_RG
            if before is not None:
                lengths_R, survivals_RG = before.averaged_with(drafts)
            made = PastSurvivals(
                step=drafts.step,
                request_ids_R=drafts.request_ids_R,
                lengths_R=lengths_R,
                survivals_RG=survivals_RG,
                is_new_R=frozen(drafts.lengths_R > 0),
                correction=correction,
            )
        if before is not None and before.is_followed is not (made is not None):
            before = replace(before, is_followed=made is not None)
        return History(past=before, last=made)

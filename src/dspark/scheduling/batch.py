"""What one step is about: the requests of its batch, and the confidences of what was drafted for them.

Shapes: R requests that decode in this step, G positions of the longest block. Row r is request slot r; the order of the
rows is fixed before anything is drafted, so it may break ties (SPEC "Hardware-aware prefix scheduler").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dspark.scheduling import compiled

__all__ = ["BoolArray", "Drafts", "FloatArray", "IntArray", "StepBatch", "survival"]

Array = TypeVar("Array", bound=npt.NDArray[Any])
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def survival(confidences_RG: npt.ArrayLike, lengths_R: npt.ArrayLike) -> FloatArray:
    """``a_k = c_1 ... c_k``, the estimate that the first k draft tokens are accepted (section 3.2.2), [R, G].

    Positions from a request's own length on are padding: 0, whatever ``confidences_RG`` holds there.

    Raises:
        ValueError: naming request and position, if a confidence is NaN or outside 0..1; shapes do not fit.
    """
    confidences, lengths = frozen_floats(confidences_RG), frozen_ints(lengths_R)
    check_fit(confidences_RG=confidences, lengths_R=lengths)
    survivals_RG = np.empty(confidences.shape)
    wrong: int = compiled.survivals(confidences, lengths, survivals_RG)
    if wrong == -2:
        raise ValueError(f"lengths_R has a length outside 0..{confidences.shape[1]}, the positions of confidences_RG")
    if wrong >= 0:
        row, position = divmod(wrong, confidences.shape[1])
        raise ValueError(
            f"confidences_RG[{row}, {position}] is {confidences[row, position]}, not a probability: "
            "give calibrated confidences (0 to 1), not logits"
        )
    return frozen(survivals_RG)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """What is known of a step before anything is drafted.

    Attributes:
        step: number of the step, counted from 0 without gaps.
        request_ids_R: a number for each decoding request that no other request ever gets (a cache slot is not one).
        draftable_R: draft tokens each request can use in this step: the block size, or less near its end.
        context_tokens: cached tokens of the decoding requests together.
        prefill_tokens: prompt tokens that share the step's forward pass.
        token_limit: tokens of the forward pass at most, prompt tokens included; None for no limit.
        own_policies_R: the name of the policy that each request brought, or None; None if no request did.
    """

    step: int
    request_ids_R: IntArray
    draftable_R: IntArray
    context_tokens: int
    prefill_tokens: int = 0
    token_limit: int | None = None
    own_policies_R: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_ids_R", frozen_ints(self.request_ids_R))
        object.__setattr__(self, "draftable_R", frozen_ints(self.draftable_R))
        if self.draftable_R.shape != (self.num_requests,):
            raise ValueError(f"draftable_R has shape {self.draftable_R.shape}; give one for each of request_ids_R")
        if self.own_policies_R is not None and len(self.own_policies_R) != self.num_requests:
            raise ValueError(f"own_policies_R has {len(self.own_policies_R)} names; give one for each of request_ids_R")
        if len(set(self.request_ids_R.tolist())) != self.num_requests:
            raise ValueError("request_ids_R names a request twice; each request has one row")
        if (least := min(self.draftable_R.tolist(), default=0)) < 0:
            raise ValueError(f"draftable_R must not be negative, got {least}")
        for name in ("step", "context_tokens", "prefill_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.token_limit is not None and self.token_limit < self.num_requests + self.prefill_tokens:
            raise ValueError(
                f"token_limit is {self.token_limit}, but {self.num_requests} anchors and {self.prefill_tokens} prompt "
                "tokens must go through: give fewer prompt tokens or requests"
            )

    @property
    def num_requests(self) -> int:
        """R."""
        return self.request_ids_R.size

    def most_verified(self, num_drafted: int) -> int:
        """Draft tokens that may be verified when ``num_drafted`` are there."""
        if self.token_limit is None:
            return num_drafted
        return min(num_drafted, self.token_limit - self.num_requests - self.prefill_tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drafts:
    """How sure the drafter is of what it drafted in one step. The drafted tokens themselves are not in it.

    Attributes:
        step: of which step.
        request_ids_R: whose row it is.
        lengths_R: drafted tokens of each request; 0 for none.
        confidences_RG: c_k of SPEC eq. 7, calibrated, each made without looking at x_k; None if the drafter has no
            confidence head. What lies behind a request's length is ignored.
    """

    step: int
    request_ids_R: IntArray
    lengths_R: IntArray
    confidences_RG: FloatArray | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_ids_R", frozen_ints(self.request_ids_R))
        object.__setattr__(self, "lengths_R", frozen_ints(self.lengths_R))
        if self.lengths_R.shape != self.request_ids_R.shape:
            raise ValueError(f"lengths_R has shape {self.lengths_R.shape}; give one for each of request_ids_R")
        if self.confidences_RG is not None:
            object.__setattr__(self, "confidences_RG", frozen_floats(self.confidences_RG))
            _ = self.survivals_RG  # refuses what is no probability

    @cached_property
    def survivals_RG(self) -> FloatArray:
        """``survival`` of them.

        Raises:
            ValueError: there are no confidences.
        """
        if self.confidences_RG is None:
            raise ValueError(
                "confidences_RG is None: this policy needs a drafter with a confidence head; choose off or fixed, or "
                "give the acceptance measured at each position in earlier steps as confidences"
            )
        return survival(self.confidences_RG, self.lengths_R)

    @property
    def num_drafted(self) -> int:
        """Draft tokens of all requests."""
        return int(self.lengths_R.sum())


def check_fit(**arrays: npt.NDArray[Any]) -> None:
    """Raise ValueError, by their names, unless the second array has one number for each row of the first."""
    (name_RG, values_RG), (name_R, values_R) = arrays.items()
    if values_RG.ndim != 2 or values_R.shape != values_RG.shape[:1]:
        raise ValueError(f"{name_RG} {values_RG.shape} and {name_R} {values_R.shape} do not fit: [R, G] and [R]")


def frozen_ints(values: npt.ArrayLike) -> IntArray:
    """A contiguous int64 array that nobody writes to any more: a copy, unless it is a read-only array already."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and _is_frozen(values):
        return values
    return frozen(np.array(values, np.int64, order="C"))


def frozen_floats(values: npt.ArrayLike) -> FloatArray:
    """A contiguous float64 array that nobody writes to any more: a copy, unless it is a read-only array already."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64 and _is_frozen(values):
        return values
    return frozen(np.array(values, np.float64, order="C"))


def frozen(array: Array) -> Array:
    """The array itself, read-only from now on."""
    array.flags.writeable = False
    return array


def _is_frozen(values: npt.NDArray[Any]) -> bool:
    flags = values.flags
    return flags.owndata and not flags.writeable and flags.c_contiguous

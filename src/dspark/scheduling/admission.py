"""Which draft tokens are verified: rank by survival, and how many of that ranking (SPEC "prefix scheduler").

The objective of a step that verifies K draft tokens of R requests is its expected committed tokens per second,

    Theta(K) = tau_hat(K) / seconds(K),    tau_hat(K) = R + the K largest survivals,

seconds being draft + schedule + verify, that is Theta = tau_hat * SPS(B) with the draft's own cost in SPS and
B = R + K + prompt tokens. What prompt tokens cost by themselves is paid whatever K is and commits nothing, so it is
left out of ``seconds``; what K draft tokens cost on top of them is not. (Left in, it would make every draft token of
such a step look cheap, and verify what costs more than it brings.)

Because a survival never exceeds the one before it, any first K of the ranking are prefixes of the requests' blocks, and
the best choice of K tokens. The rules differ in nothing but where K comes from:

* ``first_stop`` (Algorithm 1): as soon as one more does not raise Theta(K). Non-anticipating on current survivals: to
  admit x_{r,k} only the tokens before it, and admitted tokens of other requests, were looked at.
* ``global_maximum`` (section 5.2): the best of all K. Right on any cost curve, but lossless only on the survivals of an
  earlier step: on current ones it is the retrospective search of Appendix A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dspark.scheduling import compiled
from dspark.scheduling.batch import FloatArray, IntArray, StepBatch, check_fit, frozen, frozen_floats, frozen_ints
from dspark.scheduling.cost import StepCost

__all__ = [
    "BestDraft",
    "Stop",
    "best_draft",
    "first_stop",
    "global_maximum",
    "ranked_survivals",
    "throughput",
    "verify_lengths",
]

Stop = Callable[[FloatArray], int]
"""`first_stop` or `global_maximum`."""


class BestDraft(NamedTuple):
    """What a step drafts best.

    Attributes:
        throughput: Theta in tokens per second.
        length: of the drafts, the shortest of equal ones.
        budget: K.
        plain_throughput: Theta of the step without drafts.
    """

    throughput: float
    length: int
    budget: int
    plain_throughput: float

    @property
    def pays(self) -> bool:
        """Whether it beats drafting nothing."""
        return self.throughput > self.plain_throughput


def ranked_survivals(survivals_RG: FloatArray, lengths_R: IntArray) -> FloatArray:
    """The survivals of all drafted tokens, largest first, [N]."""
    is_drafted_RG = np.arange(survivals_RG.shape[1]) < lengths_R[:, None]
    return np.sort(survivals_RG[is_drafted_RG])[::-1]


def throughput(ranked_N: FloatArray, batch: StepBatch, draft_lengths_R: IntArray, cost: StepCost) -> FloatArray:
    """``Theta(K)`` in tokens per second for K = 0..N (section 3.2.2), [N + 1]. Theta(K) depends on the first K only.

    Args:
        ranked_N: survivals, largest first.
        draft_lengths_R: what is drafted in the step, for its cost; zeros for a step that does not draft.
    """
    # Summed in the order of best_draft, so that both see the same ties.
    committed_K = np.cumsum(np.concatenate(([float(batch.num_requests)], ranked_N)))
    return committed_K / (_verify_seconds(ranked_N.size, batch, cost) + cost.drafting_seconds(draft_lengths_R))


def best_draft(survivals_RG: FloatArray, batch: StepBatch, cost: StepCost, stop: Stop) -> BestDraft:
    """The largest Theta of steps whose drafts have 1, 2, ... G tokens at most, as far as requests can use them.

    Each length has its own ranking, that of all tokens without those behind it, and ``stop`` finds its K.

    Raises:
        ValueError: there is no position to draft.
    """
    if survivals_RG.shape[1] == 0:
        raise ValueError("survivals_RG has no positions: there is nothing to draft")
    if len(survivals_RG) != batch.num_requests:
        raise ValueError(f"survivals_RG has {len(survivals_RG)} rows, the batch {batch.num_requests} requests")
    theta, length, budget, plain_theta = compiled.best_draft(
        frozen_floats(survivals_RG),
        batch.draftable_R,
        (batch.num_requests, batch.context_tokens, batch.prefill_tokens),
        cost.rates,
        cost.verify.table,
        cost.draft_table(sum(length > 0 for length in batch.draftable_R.tolist())),
        cost.draft_ratio,
        cost.schedule_seconds,
        -1 if batch.token_limit is None else batch.most_verified(batch.token_limit),
        _STOPS_FIRST[stop],
    )
    return BestDraft(throughput=theta, length=length, budget=budget, plain_throughput=plain_theta)


def _verify_seconds(num_drafted: int, batch: StepBatch, cost: StepCost) -> FloatArray:
    """Of K = 0..N draft tokens."""
    return cost.verify_seconds_up_to(
        num_drafted,
        requests=batch.num_requests,
        context_tokens=batch.context_tokens,
        prefill_tokens=batch.prefill_tokens,
    )


def first_stop(theta_K: FloatArray) -> int:
    """Algorithm 1: the number of admissions before the first that does not raise Theta."""
    goes_on_N = theta_K[1:] > theta_K[:-1]
    return goes_on_N.size if goes_on_N.all() else int(goes_on_N.argmin())


def global_maximum(theta_K: FloatArray) -> int:
    """Section 5.2: the K of the largest Theta, the smallest such K."""
    return int(theta_K.argmax())


_STOPS_FIRST: Mapping[Stop, bool] = {first_stop: True, global_maximum: False}


def verify_lengths(survivals_RG: FloatArray, lengths_R: IntArray, count: int) -> IntArray:
    """How many draft tokens of each request are among the ``count`` first by (survival, position, request slot), [R].

    All are if there are no more than ``count``. Ties go to the earlier position, then to the earlier row: nothing that
    depends on the token drawn at a position decides about it.
    """
    check_fit(survivals_RG=survivals_RG, lengths_R=lengths_R)
    verified_R = np.empty(lengths_R.shape, np.int64)
    compiled.verified(frozen_floats(survivals_RG), frozen_ints(lengths_R), count, verified_R)
    return frozen(verified_R)

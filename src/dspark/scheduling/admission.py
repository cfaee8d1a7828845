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

import numpy as np

from dspark.scheduling.batch import FloatArray, IntArray, StepBatch
from dspark.scheduling.cost import StepCost

__all__ = ["first_stop", "global_maximum", "ranked_survivals", "throughput", "throughput_by_length", "verify_lengths"]


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
    return _committed(ranked_N, batch) / (
        _verify_seconds(ranked_N.size, batch, cost) + cost.drafting_seconds(draft_lengths_R)
    )


def throughput_by_length(survivals_RG: FloatArray, batch: StepBatch, cost: StepCost) -> list[FloatArray]:
    """``throughput`` of steps whose drafts have 1, 2, ... G tokens at most, as far as requests can use them.

    As long as the batch's token limit lets, as the others.
    """
    is_drafted_RG = np.arange(survivals_RG.shape[1]) < batch.draftable_R[:, None]
    survival_N, position_N = survivals_RG[is_drafted_RG], np.nonzero(is_drafted_RG)[1]
    order_N = np.argsort(-survival_N)
    survival_N, position_N = survival_N[order_N], position_N[order_N]
    verify_seconds_K = _verify_seconds(survival_N.size, batch, cost)
    lengths = np.arange(1, survivals_RG.shape[1] + 1)
    draft_seconds_G = cost.draft_seconds(int(np.count_nonzero(batch.draftable_R)), lengths) + cost.schedule_seconds
    theta = []
    for length, draft_seconds in zip(lengths, draft_seconds_G, strict=True):
        ranked_N = survival_N[position_N < length]
        committed_K = _committed(ranked_N[: batch.most_verified(ranked_N.size)], batch)
        theta.append(committed_K / (verify_seconds_K[: committed_K.size] + draft_seconds))
    return theta


def _committed(ranked_N: FloatArray, batch: StepBatch) -> FloatArray:
    """tau_hat(K) for K = 0..N."""
    committed_K = np.empty(ranked_N.size + 1)
    committed_K[0] = batch.num_requests
    np.cumsum(ranked_N, out=committed_K[1:])
    committed_K[1:] += batch.num_requests
    return committed_K


def _verify_seconds(num_drafted: int, batch: StepBatch, cost: StepCost) -> FloatArray:
    """Of K = 0..N draft tokens."""
    return cost.verify_seconds(
        np.arange(num_drafted + 1),
        requests=batch.num_requests,
        context_tokens=batch.context_tokens,
        prefill_tokens=batch.prefill_tokens,
    )


def first_stop(theta_K: FloatArray) -> int:
    """Algorithm 1: the number of admissions before the first that does not raise Theta."""
    raises_K = theta_K[1:] > theta_K[:-1]
    return raises_K.size if raises_K.all() else int(raises_K.argmin())


def global_maximum(theta_K: FloatArray) -> int:
    """Section 5.2: the K of the largest Theta, the smallest such K."""
    return int(theta_K.argmax())


def verify_lengths(survivals_RG: FloatArray, lengths_R: IntArray, count: int) -> IntArray:
    """How many draft tokens of each request are among the ``count`` first by (survival, position, request slot), [R].

    All are if there are no more than ``count``. Ties go to the earlier position, then to the earlier row: nothing that
    depends on the token drawn at a position decides about it.
    """
    num_requests, width = survivals_RG.shape
    is_drafted_GR = np.arange(width)[:, None] < lengths_R
    if count >= int(lengths_R.sum()):
        return lengths_R.copy()
    if count <= 0:
        return np.zeros(num_requests, np.int64)
    ranked_N = survivals_RG.T[is_drafted_GR]  # by position, then slot
    slot_N = np.broadcast_to(np.arange(num_requests), is_drafted_GR.shape)[is_drafted_GR]
    last = np.partition(ranked_N, ranked_N.size - count)[ranked_N.size - count]
    above = slot_N[ranked_N > last]
    level = slot_N[ranked_N == last][: count - above.size]
    return np.bincount(above, minlength=num_requests) + np.bincount(level, minlength=num_requests)

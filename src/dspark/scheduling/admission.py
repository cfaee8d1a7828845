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

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dspark.scheduling.batch import FloatArray, IntArray, StepBatch
from dspark.scheduling.cost import StepCost

__all__ = ["Stop", "best_draft", "first_stop", "global_maximum", "ranked_survivals", "throughput", "verify_lengths"]

BoolArray = npt.NDArray[np.bool_]
Stop = Callable[[FloatArray, BoolArray | None], IntArray]
"""`first_stop` or `global_maximum`."""


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
    committed_K = np.full(ranked_N.size + 1, float(batch.num_requests))
    committed_K[1:] += np.cumsum(ranked_N)
    return committed_K / (_verify_seconds(ranked_N.size, batch, cost) + cost.drafting_seconds(draft_lengths_R))


def best_draft(survivals_RG: FloatArray, batch: StepBatch, cost: StepCost, stop: Stop) -> tuple[float, int, int]:
    """The largest Theta of steps whose drafts have 1, 2, ... G tokens at most, as far as requests can use them.

    Each length has its own ranking, that of all tokens without those behind it, and ``stop`` finds its K.

    Returns:
        Theta in tokens per second, the length (of equal ones the shortest), and K.

    Raises:
        ValueError: there is no position to draft.
    """
    if survivals_RG.shape[1] == 0:
        raise ValueError("survivals_RG has no positions: there is nothing to draft")
    is_drafted_RG = np.arange(survivals_RG.shape[1]) < batch.draftable_R[:, None]
    survival_N, position_N = survivals_RG[is_drafted_RG], np.nonzero(is_drafted_RG)[1]
    order_N = np.argsort(-survival_N)
    survival_N, position_N = survival_N[order_N], position_N[order_N]
    lengths_G = np.arange(1, survivals_RG.shape[1] + 1)
    is_ranked_GN = position_N < lengths_G[:, None]
    verified_GK = np.zeros((lengths_G.size, survival_N.size + 1), np.int64)
    np.cumsum(is_ranked_GN, axis=1, out=verified_GK[:, 1:])
    committed_GK = np.zeros(verified_GK.shape)
    np.cumsum(np.where(is_ranked_GN, survival_N, 0.0), axis=1, out=committed_GK[:, 1:])
    committed_GK += batch.num_requests
    requests = int(np.count_nonzero(batch.draftable_R))
    draft_seconds_G = cost.draft_seconds(requests, lengths_G) + cost.schedule_seconds
    seconds_GK = _verify_seconds(survival_N.size, batch, cost)[verified_GK] + draft_seconds_G[:, None]
    theta_GK = np.where(verified_GK <= batch.most_verified(survival_N.size), committed_GK / seconds_GK, -np.inf)
    stop_G = stop(theta_GK, is_ranked_GN)
    best_G = theta_GK[np.arange(lengths_G.size), stop_G]
    best = int(best_G.argmax())
    return float(best_G[best]), int(lengths_G[best]), int(verified_GK[best, stop_G[best]])


def _verify_seconds(num_drafted: int, batch: StepBatch, cost: StepCost) -> FloatArray:
    """Of K = 0..N draft tokens."""
    return cost.verify_seconds(
        np.arange(num_drafted + 1),
        requests=batch.num_requests,
        context_tokens=batch.context_tokens,
        prefill_tokens=batch.prefill_tokens,
    )


def first_stop(theta_XK: FloatArray, is_ranked_XN: BoolArray | None = None) -> IntArray:
    """Algorithm 1: the number of admissions before the first that does not raise Theta, ``[X]``.

    Args:
        is_ranked_XN: False for what is passed over, with the Theta of the admissions before it.
    """
    goes_on_XN = theta_XK[..., 1:] > theta_XK[..., :-1]
    if is_ranked_XN is not None:
        goes_on_XN |= ~is_ranked_XN
    return np.asarray(np.where(goes_on_XN.all(axis=-1), goes_on_XN.shape[-1], _first_false(goes_on_XN)))


def global_maximum(theta_XK: FloatArray, is_ranked_XN: BoolArray | None = None) -> IntArray:
    """Section 5.2: the K of the largest Theta, the smallest such K, ``[X]``."""
    return np.asarray(theta_XK.argmax(axis=-1), np.int64)


def _first_false(flags_XN: BoolArray) -> IntArray:
    """Its place, anywhere if there is none."""
    return flags_XN.argmin(axis=-1) if flags_XN.shape[-1] else np.zeros(flags_XN.shape[:-1], np.int64)


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

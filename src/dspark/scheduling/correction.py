"""What became of drafts corrects what confidences promise of later ones: slowly, within bounds, request by request.

Of a token with confidence c, the odds of being accepted are taken to be ``exp(shared + own)`` times ``c / (1 - c)``: a
shift of the log-odds for all requests, and one of the request's own. Beforehand both are thought to be near 0 (normal
priors), so a few outcomes move them little, and a request of which nothing is known goes by the shared one. After each
step both take one Newton step towards their most likely values, older outcomes counting less: logistic regression on an
intercept, online. Where confidences are right both stay near 0.

Confidences still say which token is surer; only their level is learned. It is a shift of log-odds, not a factor on
survivals, because that keeps confidences between 0 and 1 and survivals falling, and says something about positions that
were not verified. Moving the bias of the confidence head does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dspark.scheduling.batch import Drafts, FloatArray, IntArray, frozen_floats, frozen_ints

__all__ = ["Correction", "corrected_survivals", "rows_of"]

_BOUND = 4.0
"""No shift leaves -4..4: a confidence of 0.9 comes to mean 0.14 or 0.998 at most."""
_OWN_PRIOR = 8.0
"""How sure it is beforehand that a request's own shift is 0, as information of outcomes: a token whose chance is c has
c (1 - c), so some 40 tokens weigh as much."""
_OWN_KEPT = 0.99
"""What is left of a request's information after one more step that drafts: half after 69."""
_SHARED_PRIOR = 16.0
_SHARED_KEPT = 0.998
"""Half after 346 steps."""
_OPTIMISM = 0.5
"""Added to the log-odds of a request of which nothing was verified yet: one that begins while drafting does not pay for
others could never show otherwise that it pays for it."""
_OPTIMISM_INFORMATION = 0.5
"""With so much information, two or three tokens, half of it is left."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """The shifts after some steps.

    Attributes:
        request_ids_R: the requests of the last step that drafted.
        own_R: shift of each one's log-odds, on top of ``shared``.
        own_information_R: Fisher information of the outcomes that it comes from.
        shared: shift of all requests' log-odds.
        shared_information: of the outcomes that it comes from.
    """

    request_ids_R: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    own_R: FloatArray = field(default_factory=lambda: np.zeros(0))
    own_information_R: FloatArray = field(default_factory=lambda: np.zeros(0))
    shared: float = 0.0
    shared_information: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_ids_R", frozen_ints(self.request_ids_R))
        object.__setattr__(self, "own_R", frozen_floats(self.own_R))
        object.__setattr__(self, "own_information_R", frozen_floats(self.own_information_R))

    def log_odds_of(self, request_ids_R: IntArray) -> FloatArray:
        """What to add to the log-odds of these requests' confidences, [R]."""
        own_R, information_R = self._own_of(request_ids_R)
        optimism_R = _OPTIMISM * _OPTIMISM_INFORMATION / (_OPTIMISM_INFORMATION + information_R)
        return _bounded(self.shared + own_R + optimism_R)

    def after(self, drafts: Drafts, verified_R: IntArray, accepted_R: IntArray) -> Correction:
        """The shifts once it is known what became of the drafts of one more step.

        A token is judged if all before it were accepted: the first ``accepted + 1`` of those verified. Requests that
        are not in the step (they ended, or lost their memory to others) are forgotten, as their survivals are.

        Raises:
            ValueError: the drafts are without confidences.
        """
        if drafts.confidences_RG is None:
            raise ValueError("confidences_RG is None: there is nothing to correct")
        own_R, information_R = self._own_of(drafts.request_ids_R)
        is_judged_RG = np.arange(drafts.confidences_RG.shape[1]) < np.minimum(accepted_R + 1, verified_R)[:, None]
        confidences_RG = np.where(is_judged_RG, drafts.confidences_RG, 0.0)
        expected_RG = _shifted(confidences_RG, _bounded(self.shared + own_R))
        surplus_R = accepted_R - expected_RG.sum(axis=1)
        gained_R = (expected_RG * (1.0 - expected_RG)).sum(axis=1)
        information_R = _OWN_KEPT * information_R + gained_R
        shared_information = _SHARED_KEPT * self.shared_information + float(gained_R.sum())
        # What is forgotten leaves its weight to the prior, which pulls towards 0.
        own_R = own_R + (surplus_R - (1.0 - _OWN_KEPT) * _OWN_PRIOR * own_R) / (information_R + _OWN_PRIOR)
        pull = (1.0 - _SHARED_KEPT) * _SHARED_PRIOR * self.shared
        shared = self.shared + (surplus_R.sum() - pull) / (shared_information + _SHARED_PRIOR)
        return Correction(
            request_ids_R=drafts.request_ids_R,
            own_R=_bounded(own_R),
            own_information_R=information_R,
            shared=float(_bounded(shared)),
            shared_information=shared_information,
        )

    def _own_of(self, request_ids_R: IntArray) -> tuple[FloatArray, FloatArray]:
        """Own shift and information of these requests; 0 for those it does not know."""
        if self.request_ids_R.size == 0:
            return np.zeros(request_ids_R.shape), np.zeros(request_ids_R.shape)
        row_R, is_known_R = rows_of(self.request_ids_R, request_ids_R)
        return np.where(is_known_R, self.own_R[row_R], 0.0), np.where(is_known_R, self.own_information_R[row_R], 0.0)


def corrected_survivals(survivals_RG: FloatArray, log_odds_R: FloatArray) -> FloatArray:
    """Survivals of confidences (each the ratio of a survival to the one before) with their log-odds shifted, [R, G]."""
    before_RG = np.ones_like(survivals_RG)
    before_RG[:, 1:] = survivals_RG[:, :-1]
    confidences_RG = np.divide(survivals_RG, before_RG, out=np.zeros_like(survivals_RG), where=before_RG > 0.0)
    return np.cumprod(_shifted(confidences_RG, log_odds_R), axis=1, dtype=np.float64)


def rows_of(known_ids_O: IntArray, request_ids_R: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """The row of each request among those known (at least one), and whether it is there; another's row if it is not."""
    by_id = np.argsort(known_ids_O)
    place_R = np.searchsorted(known_ids_O, request_ids_R, sorter=by_id)
    row_R = by_id[np.minimum(place_R, by_id.size - 1)]
    return row_R, known_ids_O[row_R] == request_ids_R


def _shifted(confidences_RG: FloatArray, log_odds_R: FloatArray) -> FloatArray:
    """Confidences whose odds are ``exp(log_odds_R)`` times what they were; 0 and 1 stay what they are."""
    more_RG = confidences_RG * np.exp(log_odds_R)[:, None]
    return more_RG / (1.0 - confidences_RG + more_RG)


def _bounded(log_odds: npt.ArrayLike) -> FloatArray:
    return np.clip(np.asarray(log_odds, np.float64), -_BOUND, _BOUND)

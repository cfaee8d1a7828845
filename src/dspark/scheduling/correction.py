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

from dspark.scheduling import compiled
from dspark.scheduling.batch import Drafts, FloatArray, IntArray, check_fit, frozen, frozen_floats, frozen_ints

__all__ = ["Correction", "corrected_survivals"]

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

    def log_odds_of(self, request_ids_R: IntArray, optimism: float = _OPTIMISM) -> FloatArray:
        """What to add to the log-odds of these requests' confidences, [R]; with ``optimism`` where little is known."""
        log_odds_R = np.empty(request_ids_R.shape)
        compiled.log_odds(
            self.request_ids_R, self.own_R, self.own_information_R, self.shared, frozen_ints(request_ids_R),
            optimism, _OPTIMISM_INFORMATION, _BOUND, log_odds_R,
        )  # fmt: skip
        return frozen(log_odds_R)

    def after(self, drafts: Drafts, verified_R: IntArray, accepted_R: IntArray) -> Correction:
        """The shifts once it is known what became of the drafts of one more step.

        A token is judged if all before it were accepted: the first ``accepted + 1`` of those verified. Requests that
        are not in the step (they ended, or lost their memory to others) are forgotten, as their survivals are.

        Raises:
            ValueError: the drafts are without confidences, or the others are not one number for each request.
        """
        if drafts.confidences_RG is None:
            raise ValueError("confidences_RG is None: there is nothing to correct")
        verified_R, accepted_R = frozen_ints(verified_R), frozen_ints(accepted_R)
        if not verified_R.shape == accepted_R.shape == drafts.lengths_R.shape:
            raise ValueError(
                f"verified_R {verified_R.shape} and accepted_R {accepted_R.shape} must be one number for each of the "
                f"{drafts.lengths_R.size} requests"
            )
        own_R, information_R = np.empty(drafts.request_ids_R.shape), np.empty(drafts.request_ids_R.shape)
        shared, shared_information = compiled.learned(
            self.request_ids_R, self.own_R, self.own_information_R, self.shared, self.shared_information,
            drafts.request_ids_R, drafts.confidences_RG, verified_R, accepted_R,
            _OWN_KEPT, _OWN_PRIOR, _SHARED_KEPT, _SHARED_PRIOR, _BOUND, own_R, information_R,
        )  # fmt: skip
        return Correction(
            request_ids_R=drafts.request_ids_R,
            own_R=frozen(own_R),
            own_information_R=frozen(information_R),
            shared=shared,
            shared_information=shared_information,
        )


def corrected_survivals(survivals_RG: FloatArray, log_odds_R: FloatArray) -> FloatArray:
    """Survivals of confidences (each the ratio of a survival to the one before) with their log-odds shifted, [R, G]."""
    check_fit(survivals_RG=survivals_RG, log_odds_R=log_odds_R)
    corrected_RG = np.empty(survivals_RG.shape)
    compiled.corrected(frozen_floats(survivals_RG), frozen_floats(log_odds_R), corrected_RG)
    return frozen(corrected_RG)

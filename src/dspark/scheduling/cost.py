"""What a step costs on this hardware: seconds of its parts, from measured points, corrected slowly while serving.

SPS(B) of the paper is one over these seconds. ``dspark profile`` measures; here nothing is timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from dspark.scheduling import compiled
from dspark.scheduling.batch import FloatArray, IntArray, frozen_floats
from dspark.scheduling.curve import MeasuredCurve

__all__ = ["DraftPoint", "PrefillPoint", "StepCost", "StepSeconds", "VerifyPoint"]

_FORMAT = 2
_RATE = 0.02
"""Weight of one measured step in the correction: its half-life is 34 steps."""
_OUTLIER = 2.0
"""A single step counts as at most this factor off, so that a pause of the machine moves the correction by 1.4 %."""
_LESS_SURE = 4.0
"""So much faster is learned what draft tokens add than what the rest takes: it is a small part of most passes."""
_MOST_ADDED = 0.9
"""Of no measured step do requests and context take more than this part."""
_BOUND = 2.0
"""The correction never leaves 1/2..2: further off, the hardware is not what was profiled; profile again."""


_RATIOS = ("verify_ratio", "added_ratio", "draft_ratio")
_SLOPES = ("seconds_per_request", "seconds_per_context_token", "seconds_per_attended_token")


@dataclass(frozen=True, kw_only=True)
class VerifyPoint:
    """A measured target step: ``tokens`` of ``requests`` that hold ``context_tokens`` cached tokens together."""

    tokens: int
    requests: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DraftPoint:
    """A measured draft of ``block_length`` tokens for each of ``requests``."""

    requests: int
    block_length: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PrefillPoint:
    """What ``tokens`` prompt tokens add to a decoding step, in seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of a step, predicted or measured.

    Attributes:
        draft: of the drafter's blocks.
        schedule: of decisions before and after.
        verify: of the target's pass, prompt tokens of the step included.
        added: the part of ``verify`` that draft tokens add, where it is predicted.
        catch_up: of context that the drafter had put off: prompts, and what came while nothing was drafted. It is
            not predicted.
    """

    draft: float
    schedule: float
    verify: float
    added: float = 0.0
    catch_up: float = 0.0

    @property
    def drafter(self) -> float:
        """Of all that the drafter does."""
        return self.catch_up + self.draft

    @property
    def total(self) -> float:
        """Of the whole step."""
        return self.drafter + self.schedule + self.verify


class _DraftTables(NamedTuple):
    """``StepCost.draft_table`` of the curves that it comes from."""

    of: Mapping[int, MeasuredCurve]
    by_requests: dict[int, tuple[FloatArray, FloatArray]]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of draft, schedule, verify and prefill.

    Attributes:
        verify: over the tokens of a step, at no context and not counting requests.
        seconds_per_request: what each request adds to a target step, beyond its tokens.
        seconds_per_context_token: what each cached token adds to it.
        seconds_per_attended_token: what each cached token adds to it for each token of the step that attends to it.
        draft: block length -> seconds over requests. Between measured lengths a straight line, from none at length 0;
            beyond the longest it goes on in proportion to the length. A longer block never costs less.
        prefill: what prompt tokens add to a step.
        schedule_seconds: for choosing lengths, in a step that drafts.
        verify_ratio: correction of everything the target does, 1 as profiled.
        added_ratio: correction of what draft tokens add to its pass, on top of that: whether a draft pays is decided
            by a small part of the pass, which may be wrong where the whole is right.
        draft_ratio: correction of the draft.

    Raises:
        ValueError: naming the field.
    """

    verify: MeasuredCurve
    seconds_per_request: float = 0.0
    seconds_per_context_token: float = 0.0
    seconds_per_attended_token: float = 0.0
    draft: Mapping[int, MeasuredCurve]
    prefill: MeasuredCurve
    schedule_seconds: float = 0.0
    verify_ratio: float = 1.0
    added_ratio: float = 1.0
    draft_ratio: float = 1.0
    _draft_tables: _DraftTables | None = field(default=None, repr=False, compare=False)
    """Looked up before; a corrected copy keeps them."""

    def __post_init__(self) -> None:
        if self._draft_tables is None or self._draft_tables.of is not self.draft:
            object.__setattr__(self, "_draft_tables", _DraftTables(self.draft, {}))
        if not self.draft or min(self.draft) < 1 or list(self.draft) != sorted(self.draft):
            raise ValueError(f"draft has block lengths {list(self.draft)}: give at least one, increasing, from 1 token")
        for name in (*_SLOPES, "schedule_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name in _RATIOS:
            if not 1.0 / _BOUND <= getattr(self, name) <= _BOUND:
                raise ValueError(f"{name} must be in {1 / _BOUND}..{_BOUND}, got {getattr(self, name)}: profile again")

    @classmethod
    def fitted(
        cls,
        verify: Iterable[VerifyPoint],
        draft: Iterable[DraftPoint],
        prefill: Iterable[PrefillPoint],
        *,
        schedule_seconds: float = 0.0,
    ) -> StepCost:
        """The cost through measured points.

        What requests and context add is fitted (least squares, not below 0) to the differences between points with the
        same number of tokens, so it cannot take anything of the curve over tokens; then the curve is laid through what
        is left. Points that differ in tokens alone are therefore kept exactly. On a disturbed machine the fit can say
        that requests and context add more than a whole step took: it is cut down, so that they take no point whole.
        """
        points = list(verify)
        slopes = _slopes(points)
        added = max(float(np.dot(slopes, _features(point))) / point.seconds for point in points)
        if added > _MOST_ADDED:
            slopes = [slope * _MOST_ADDED / added for slope in slopes]
        left_over = [(point.tokens, point.seconds - float(np.dot(slopes, _features(point)))) for point in points]
        curves: dict[int, list[tuple[int, float]]] = {}
        for draft_point in draft:
            curves.setdefault(draft_point.block_length, []).append((draft_point.requests, draft_point.seconds))
        return cls(
            verify=MeasuredCurve.through(left_over),
            seconds_per_request=slopes[0],
            seconds_per_context_token=slopes[1],
            seconds_per_attended_token=slopes[2],
            draft={length: MeasuredCurve.through(curves[length]) for length in sorted(curves)},
            prefill=MeasuredCurve.through((p.tokens, p.seconds) for p in prefill),
            schedule_seconds=schedule_seconds,
        )

    def verify_seconds_up_to(
        self, most: int, *, requests: int, context_tokens: int, prefill_tokens: int = 0
    ) -> FloatArray:
        """Seconds of the target's pass over the anchors of ``requests`` and 0, 1, ... ``most`` draft tokens.

        Prompt tokens shift the place on the curve (draft tokens cost what they cost on top of them), but what they cost
        alone is not in it: that is ``prefill_seconds``. How many of the tokens are whose is not known yet: each
        attends to the mean context.
        """
        seconds_K = np.empty(most + 1)
        compiled.verify_seconds((requests, context_tokens, prefill_tokens), self.rates, self.verify.table, seconds_K)
        return seconds_K

    def verify_seconds(
        self, draft_tokens: int, *, requests: int, context_tokens: int, prefill_tokens: int = 0
    ) -> float:
        """Seconds of one such pass (``verify_seconds_up_to``)."""
        seconds_K = self.verify_seconds_up_to(
            draft_tokens, requests=requests, context_tokens=context_tokens, prefill_tokens=prefill_tokens
        )
        return float(seconds_K[-1])

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds that ``tokens`` prompt tokens add to a step."""
        return self.verify_ratio * self.prefill.at(tokens) if tokens > 0 else 0.0

    @property
    def rates(self) -> tuple[float, float, float, float, float]:
        """What compiled code knows of ``verify_seconds``, beside the curve and the load."""
        per_token = self.seconds_per_context_token, self.seconds_per_attended_token
        return self.seconds_per_request, *per_token, self.verify_ratio, self.added_ratio

    def draft_table(self, requests: int) -> tuple[FloatArray, FloatArray]:
        """Block lengths from 0 on, and seconds of drafting these for so many requests, before the correction."""
        assert self._draft_tables is not None, "it was made with the object"
        tables = self._draft_tables.by_requests
        if requests not in tables:
            seconds = accumulate((curve.at(requests) for curve in self.draft.values()), max)
            tables[requests] = frozen_floats([0, *self.draft]), frozen_floats([0.0, *seconds])
        return tables[requests]

    def draft_seconds(self, requests: int, block_length: int) -> float:
        """Seconds of drafting ``block_length`` tokens for each of ``requests``."""
        if requests <= 0:
            return 0.0
        return float(self.draft_ratio * compiled.draft_seconds(block_length, *self.draft_table(requests)))

    def drafting_seconds(self, draft_lengths_R: IntArray) -> float:
        """Seconds of draft and schedule for blocks of these lengths; 0 if nothing is drafted."""
        requests = int(np.count_nonzero(draft_lengths_R))
        if requests == 0:
            return 0.0
        return self.draft_seconds(requests, int(draft_lengths_R.max())) + self.schedule_seconds

    def corrected(self, predicted: StepSeconds, measured: StepSeconds) -> StepCost:
        """The cost after one more measured step: an average of the logarithm of the ratio, slow and within bounds.

        What is off in a pass with draft tokens is shared out between ``verify_ratio`` and ``added_ratio`` by their
        parts in it (normalised least mean squares): passes with more and with fewer of them tell the two apart.
        """
        added = predicted.added / predicted.verify if predicted.added > 0.0 else 0.0
        rest, weight = 1.0 - added, _LESS_SURE * added
        off = _off(predicted.verify, measured.verify) / (rest * rest + weight * added)
        return replace(
            self,
            verify_ratio=_moved(self.verify_ratio, rest * off),
            added_ratio=_moved(self.added_ratio, weight * off),
            draft_ratio=_moved(self.draft_ratio, _off(predicted.draft, measured.draft)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, for JSON."""
        return {
            "format": _FORMAT,
            "verify": _curve_dict(self.verify),
            "seconds_per_request": self.seconds_per_request,
            "seconds_per_context_token": self.seconds_per_context_token,
            "seconds_per_attended_token": self.seconds_per_attended_token,
            "draft": {str(length): _curve_dict(curve) for length, curve in self.draft.items()},
            "prefill": _curve_dict(self.prefill),
            "schedule_seconds": self.schedule_seconds,
            **{name: getattr(self, name) for name in _RATIOS},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepCost:
        """What ``as_dict`` gave.

        Raises:
            ValueError: it is of another format, or a field is missing or wrong.
        """
        if values.get("format") != _FORMAT:
            raise ValueError(f"cost format is {values.get('format')}, this version reads {_FORMAT}: profile again")
        names = (*_SLOPES, *_RATIOS, "schedule_seconds")
        missing = {"verify", "draft", "prefill", *names} - values.keys()
        if missing:
            raise ValueError(f"cost lacks {', '.join(sorted(missing))}: profile again")
        draft = {int(length): _curve(curve, "draft") for length, curve in values["draft"].items()}
        return cls(
            verify=_curve(values["verify"], "verify"),
            draft=dict(sorted(draft.items())),
            prefill=_curve(values["prefill"], "prefill"),
            seconds_per_request=float(values["seconds_per_request"]),
            seconds_per_context_token=float(values["seconds_per_context_token"]),
            seconds_per_attended_token=float(values["seconds_per_attended_token"]),
            schedule_seconds=float(values["schedule_seconds"]),
            verify_ratio=float(values["verify_ratio"]),
            added_ratio=float(values["added_ratio"]),
            draft_ratio=float(values["draft_ratio"]),
        )


def _features(point: VerifyPoint) -> tuple[float, float, float]:
    """What ``_SLOPES`` are the seconds of; each request of a measured step has the same context."""
    return point.requests, point.context_tokens, point.tokens * point.context_tokens / point.requests


def _slopes(points: list[VerifyPoint]) -> list[float]:
    """Seconds for each of ``_SLOPES``, from points with equal tokens; 0 where nothing differs."""
    tokens = np.array([point.tokens for point in points])
    features = np.array([_features(point) for point in points], np.float64).reshape(-1, len(_SLOPES))
    seconds = np.array([point.seconds for point in points])
    for size in np.unique(tokens):
        is_size = tokens == size
        features[is_size] -= features[is_size].mean(axis=0)
        seconds[is_size] -= seconds[is_size].mean()
    scale = np.abs(features).max(axis=0, initial=0.0)
    used = [column for column in range(len(_SLOPES)) if scale[column] > 0]
    found = [0.0] * len(_SLOPES)
    while used:
        slopes = np.linalg.lstsq(features[:, used] / scale[used], seconds, rcond=None)[0] / scale[used]
        if (slopes >= 0).all():
            for column, slope in zip(used, slopes.tolist(), strict=True):
                found[column] = slope
            break
        used.pop(int(slopes.argmin()))
    return found


def _off(predicted: float, measured: float) -> float:
    """Logarithm of measured over predicted seconds, at most that of an outlier; 0 if the part was not in the step."""
    if not (predicted > 0.0 and measured > 0.0 and math.isfinite(measured)):
        return 0.0
    return math.log(min(max(measured / predicted, 1.0 / _OUTLIER), _OUTLIER))


def _moved(ratio: float, off: float) -> float:
    return min(max(ratio * math.exp(_RATE * off), 1.0 / _BOUND), _BOUND)


def _curve_dict(curve: MeasuredCurve) -> dict[str, Any]:
    return {"sizes": list(curve.sizes), "seconds": list(curve.seconds)}


def _curve(values: Mapping[str, Any], name: str) -> MeasuredCurve:
    try:
        return MeasuredCurve(sizes=tuple(values["sizes"]), seconds=tuple(values["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cost field {name} is no measured curve: {error}") from error

"""Batches, drafts and costs for tests of scheduling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dspark.scheduling import Correction, Drafts, History, MeasuredCurve, PastSurvivals, StepBatch, StepCost


def cost_over_tokens(seconds, *, draft: float = 1e-9, **more) -> StepCost:
    """Seconds of 1, 2, 3, ... tokens; a draft of any size costs ``draft``."""
    return StepCost(
        verify=MeasuredCurve(sizes=tuple(range(1, len(seconds) + 1)), seconds=tuple(seconds)),
        draft={32: MeasuredCurve(sizes=(1, 1000), seconds=(draft, draft))},
        prefill=MeasuredCurve(sizes=(1,), seconds=(0.1,)),
        **more,
    )


def batch_of(lengths, *, step: int = 7, ids=None, **more) -> StepBatch:
    ids = range(len(lengths)) if ids is None else ids
    return StepBatch(
        step=step,
        request_ids_R=np.array(list(ids), int),
        draftable_R=np.array(lengths, int),
        context_tokens=more.pop("context_tokens", 0),
        **more,
    )


def drafts_of(rows, *, step: int = 7, ids=None, lengths=None) -> Drafts:
    """Rows of confidences, of any lengths; None for a drafter without confidence head."""
    ids = range(len(rows)) if ids is None else ids
    lengths = [len(row) for row in rows] if lengths is None else lengths
    confidences_RG = np.full((len(rows), max(map(len, rows), default=0)), np.nan)  # padding must never be looked at
    for row, values in enumerate(rows):
        confidences_RG[row, : len(values)] = values
    return Drafts(
        step=step,
        request_ids_R=np.array(list(ids), int),
        lengths_R=np.array(lengths, int),
        confidences_RG=confidences_RG,
    )


def past_of(rows, *, step: int = 5, ids=None) -> PastSurvivals:
    """The past of a step with these confidences, of which much was seen and all was as they said."""
    drafts = drafts_of(rows, step=step, ids=ids)
    past = History().after(drafts).after(None).past
    assert past is not None
    return replace(past, correction=right_about(drafts.request_ids_R))


def right_about(ids) -> Correction:
    """Knows of each of these requests that its confidences are right."""
    ids_R = np.array(list(ids), int)
    return Correction(request_ids_R=ids_R, own_R=np.zeros(ids_R.size), own_information_R=np.full(ids_R.size, 1e15))

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.models.target import TargetOutput
from dspark.training.data.rows import DataRow
from dspark.training.states import OnlineStates, RowStates, StateSource, StoreSpec, build_states, store_spec
from dspark.training.tap_scale import tap_scale
from dspark.types import Segment
from tests.training.tiny import tiny_target


def assert_same(ours: Sequence[RowStates], theirs: Sequence[RowStates], *, tolerance: float) -> None:
    """Equal up to one rounding to bfloat16 of numbers that differ by ``tolerance``, and the same most likely tokens."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.response_spans == other.response_spans
        assert torch.equal(one.token_ids_S, other.token_ids_S)
        for name in ("taps_ST", "hidden_PH"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.dtype == b.dtype == torch.bfloat16
            assert a.shape == b.shape
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=tolerance)
            assert tolerance > 1e-4 or (a != b).sum() <= 0.01 * a.numel()
        assert one.log_normaliser_P.dtype == other.log_normaliser_P.dtype == torch.float32
        torch.testing.assert_close(one.log_normaliser_P, other.log_normaliser_P, rtol=1e-3, atol=max(1e-2, tolerance))
        assert one.argmax_P.dtype == other.argmax_P.dtype
        assert (one.argmax_P != other.argmax_P).sum() <= (0 if tolerance < 1e-4 else 0.1 * len(one.argmax_P))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("int8", 1e-5), ("bfloat16", 0.1)])
def test_both_sources_give_the_same_states(rows: list[DataRow], tmp_path: Path, dtype: str, tolerance: float) -> None:
    target = tiny_target(dtype=dtype)
    mute = replace(rows[1], id="mute", response_spans=((19, 20),), finish_reasons=("length",))
    data = [
        *rows,
        mute,
        replace(
            rows[0], id="short", token_ids=rows[0].token_ids[:28], response_spans=((4, 28),), finish_reasons=("stop",)
        ),
    ]
    spec = store_spec(target.model, tap_layers=(0, 2), max_length=36, target_dtype=dtype)
    store: StateSource = build_states(target.model, data, tmp_path, spec, tokens_per_batch=100)
    online: StateSource = OnlineStates(target.model, data, spec, tokens_per_batch=150)
    assert online.spec == store.spec
    assert [row.id for row in online.rows] == [row.id for row in data if row.id != "mute"]
    assert sorted(online.rows, key=str) == sorted(store.rows, key=str)
    assert_same(online.read(online.rows), store.read(online.rows), tolerance=tolerance)
    some = [online.rows[5], online.rows[6], online.rows[1], online.rows[5], online.rows[0]]
    ends = [30, 4, 1, 12, 1000]
    assert_same(online.read(some, ends), store.read(some, ends), tolerance=tolerance)


def test_nothing_beyond_the_ends_is_computed(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[int]] = []
    forward = type(target.model).forward

    def count(
        self: Any, token_ids_N: torch.Tensor, segments: Sequence[Segment], *rest: Any, **options: Any
    ) -> TargetOutput:
        passes.append([segment.length for segment in segments])
        return forward(self, token_ids_N, segments, *rest, **options)

    monkeypatch.setattr(type(target.model), "forward", count)
    source = OnlineStates(target.model, rows, spec, tokens_per_batch=45)
    assert passes == []
    states = source.read(source.rows, [20, 10, 30, 12, 11, 43])
    assert passes == [[10, 11, 12], [20], [30], [43]]
    assert [len(row.taps_ST) for row in states] == [20, 10, 30, 12, 11, 43]
    assert all(s.token_ids_S.tolist() == list(row.token_ids) for s, row in zip(states, rows, strict=True))
    assert source.read([]) == []


def test_misuse_is_named(target: LoadedTarget, rows: list[DataRow], spec: StoreSpec) -> None:
    with pytest.raises(ValueError, match="row id toy/0-000 occurs twice"):
        OnlineStates(target.model, [rows[0], rows[0]], spec)
    with pytest.raises(ValueError, match="another target"):
        OnlineStates(tiny_target(seed=1).model, rows, spec)


def test_the_tap_scale_is_the_usual_size_not_the_massive_one(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec
) -> None:
    source = OnlineStates(target.model, rows, spec)
    usual = tap_scale(source, source.rows)
    taps = [states.taps_ST for states in source.read(source.rows)]
    deviation = torch.cat(taps).float().square().mean(dim=0).sqrt()
    assert usual.shape == deviation.shape
    assert ((usual / deviation).log().abs() < 0.7).all()

    class MassiveFirstToken(OnlineStates):
        def read(self, *arguments: Any) -> list[RowStates]:
            states = super().read(*arguments)
            for row in states:
                row.taps_ST[0] = 1e4
            return states

    massive = MassiveFirstToken(target.model, rows, spec)
    assert (tap_scale(massive, massive.rows) / usual < 1.3).all()

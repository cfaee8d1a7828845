from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.training.anchors import anchor_positions
from dspark.training.data.rows import DataRow
from dspark.training.states import (
    RowStates,
    StateStore,
    StoredRow,
    StoreSpec,
    build_states,
    estimate_states,
    store_spec,
)
from dspark.training.tap_scale import tap_scale
from dspark.types import Segment
from tests.training.tiny import HIDDEN, VOCAB, greedy_rows, tiny_target


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def rows(target: LoadedTarget) -> list[DataRow]:
    return greedy_rows(target, rows=6)


@pytest.fixture(scope="module")
def spec(target: LoadedTarget) -> StoreSpec:
    return store_spec(target.model, tap_layers=(0, 2), max_length=100, target_dtype="float32")


class Killed(BaseException):
    """Stands for kill -9 between two batches."""


def kill_after(calls: int) -> Callable[[int], None]:
    left = calls

    def on_progress(tokens: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    return on_progress


def test_states_are_those_of_the_target(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    store = build_states(target.model, rows, tmp_path / "s", spec, tokens_per_batch=150, shard_bytes=12_000)
    assert len(store.shards) > 1
    assert {row.id for row in store.rows} == {row.id for row in rows}
    by_id = {row.id: row for row in rows}
    for stored in store.rows:
        row, states = by_id[stored.id], store.read(stored)
        length = len(row.token_ids)
        cache = target.model.new_cache(1, length)
        output = target.model.forward(
            torch.tensor(row.token_ids), [Segment(slot=0, start=0, length=length)], cache, tap_layers=(0, 2)
        )
        assert output.taps_NT is not None
        positions = torch.from_numpy(anchor_positions(row.response_spans))
        assert states.token_ids_S.tolist() == list(row.token_ids)
        torch.testing.assert_close(states.taps_ST.float(), output.taps_NT, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(states.hidden_PH.float(), output.hidden_NH[positions], rtol=1e-2, atol=1e-2)
        assert states.taps_ST.dtype == states.hidden_PH.dtype == torch.bfloat16
        logits = states.hidden_PH.float() @ target.model.lm_head_weight_VH.T
        torch.testing.assert_close(states.log_normaliser_P, logits.logsumexp(dim=1), rtol=1e-5, atol=1e-4)
        assert states.argmax_P.tolist() == logits.argmax(dim=1).tolist()


def test_the_size_is_known_beforehand(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    estimate = estimate_states(rows, tmp_path / "s", spec)
    store = build_states(target.model, rows, tmp_path / "s", spec)
    assert estimate.rows == len(rows)
    assert estimate.tokens == sum(len(row.token_ids) for row in rows)
    assert sum(shard["bytes"] for shard in store.shards) == pytest.approx(estimate.bytes, rel=0.02)
    assert estimate_states(rows, tmp_path / "s", spec).bytes == 0


def test_a_killed_run_goes_on_after_its_last_shard(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    directory = tmp_path / "s"
    with pytest.raises(Killed):
        build_states(
            target.model, rows, directory, spec, tokens_per_batch=50, shard_bytes=10_000, on_progress=kill_after(4)
        )
    (directory / ".shard-00009.safetensors.1").write_bytes(b"half")
    before = {path.name: path.stat().st_mtime_ns for path in directory.glob("shard-*")}
    assert 0 < len(before) < len(rows)
    done: list[int] = []
    store = build_states(
        target.model, rows, directory, spec, tokens_per_batch=50, shard_bytes=10_000, on_progress=done.append
    )
    assert sorted(row.id for row in store.rows) == sorted(row.id for row in rows)
    assert sum(done) < sum(len(row.token_ids) for row in rows)
    assert all((directory / name).stat().st_mtime_ns == time for name, time in before.items())
    assert not list(directory.glob(".*"))
    whole = build_states(target.model, rows, tmp_path / "whole", spec)
    theirs = {row.id: row for row in whole.rows}
    for row in store.rows:
        assert torch.equal(store.read(row).taps_ST, whole.read(theirs[row.id]).taps_ST)


def test_a_store_grows_with_its_data(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    build_states(target.model, rows[:2], tmp_path, spec)
    store = build_states(target.model, rows, tmp_path, spec)
    assert [row.id for row in store.rows[:2]] == sorted(row.id for row in rows[:2])
    assert len(store.rows) == len(rows)


def test_damage_is_found_and_named(target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path) -> None:
    build_states(target.model, rows, tmp_path, spec)
    shard = tmp_path / "shard-00000.safetensors"
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[-10] ^= 1
    shard.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is damaged \(sha256 .* delete"):
        StateStore.open(tmp_path, spec)
    shard.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"shard-00000.safetensors has \d+ bytes instead of \d+ \(truncated\?\)"):
        StateStore.open(tmp_path, spec, verify=False)
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is missing"):
        StateStore.open(tmp_path, spec)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        StateStore.open(tmp_path)
    with pytest.raises(ValueError, match="holds no teacher states"):
        StateStore.open(tmp_path / "elsewhere")


def test_a_store_of_other_settings_or_rows_is_refused(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    build_states(target.model, rows[:1], tmp_path, spec)
    with pytest.raises(ValueError, match=r"other settings: tap_layers \(0, 2\) \(now \(1, 2\)\)"):
        StateStore.open(tmp_path, replace(spec, tap_layers=(1, 2)))
    other = store_spec(tiny_target(seed=1).model, tap_layers=(0, 2), max_length=100, target_dtype="float32")
    with pytest.raises(ValueError, match="target_fingerprint"):
        StateStore.open(tmp_path, other)
    changed = replace(rows[0], token_ids=(*rows[0].token_ids[:-1], 7))
    with pytest.raises(ValueError, match=r"row toy/0-000 is not the one"):
        build_states(target.model, [changed], tmp_path, spec)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        StateStore.open(tmp_path)


def test_a_full_disk_is_refused_before_anything_is_computed(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.states._DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(OSError, match=r"need .* GiB in .*free.*use fewer rows"):
        build_states(target.model, rows, tmp_path, spec)
    assert list(tmp_path.iterdir()) == []


def test_long_rows_are_cut_and_rows_without_labels_left_out(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    short = replace(spec, max_length=20)
    mute = replace(rows[1], id="mute", response_spans=((19, 30),), finish_reasons=("length",))
    store = build_states(target.model, [rows[0], mute], tmp_path, short)
    (stored,) = store.rows
    assert stored.length == 20
    assert stored.response_spans == ((4, 20),)
    assert len(store.read(stored).taps_ST) == 20
    assert len(store.read(stored).hidden_PH) == 15


def test_settings_that_the_target_cannot_have_are_refused(target: LoadedTarget) -> None:
    with pytest.raises(ValueError, match=r"tap_layers has 3: .*the final one is not allowed"):
        store_spec(target.model, tap_layers=(0, 3), max_length=100, target_dtype="float32")
    with pytest.raises(ValueError, match="max_length is 1000"):
        store_spec(target.model, tap_layers=(0,), max_length=1000, target_dtype="float32")


def test_token_ids_outside_the_vocabulary_are_refused(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    wrong = replace(rows[0], token_ids=(*rows[0].token_ids[:-1], VOCAB))
    with pytest.raises(ValueError, match=f"token id {VOCAB}"):
        build_states(target.model, [wrong], tmp_path, spec)


def test_bfloat16_targets_are_stored_too(rows: list[DataRow], tmp_path: Path) -> None:
    target = tiny_target(dtype="bfloat16")
    spec = store_spec(target.model, tap_layers=(1,), max_length=100, target_dtype="bfloat16")
    store = build_states(target.model, rows[:1], tmp_path, spec)
    assert store.read(store.rows[0]).taps_ST.shape == (len(rows[0].token_ids), HIDDEN)


def test_the_tap_scale_is_the_usual_size_not_the_massive_one(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = build_states(target.model, rows, tmp_path, spec)
    usual = tap_scale(store, store.rows)
    deviation = torch.cat([store.read(row).taps_ST.float() for row in store.rows]).square().mean(dim=0).sqrt()
    assert usual.shape == (2 * HIDDEN,)
    assert ((usual / deviation).log().abs() < 0.7).all()
    read = StateStore.read

    def with_a_massive_first_token(self: StateStore, row: StoredRow) -> RowStates:
        states = read(self, row)
        taps_ST = states.taps_ST.clone()
        taps_ST[0] = 1e4
        return replace(states, taps_ST=taps_ST)

    monkeypatch.setattr(StateStore, "read", with_a_massive_first_token)
    assert (tap_scale(store, store.rows) / usual < 1.3).all()


def test_only_one_process_writes_and_only_its_own_leftovers_go(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    """Two writers would number their shards alike, and one would then read the states of the other's rows."""
    (tmp_path / ".bashrc").write_text("not ours")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".shard-00007.safetensors.123").write_bytes(b"half")

    def meanwhile(tokens: int) -> None:
        with pytest.raises(BlockingIOError, match="another process is writing"):
            build_states(target.model, rows[::-1], tmp_path, spec)

    build_states(target.model, rows, tmp_path, spec, tokens_per_batch=50, on_progress=meanwhile)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".bashrc", ".git"]
    build_states(target.model, rows, tmp_path, spec)


def test_another_checkpoint_of_the_same_shape_is_noticed() -> None:
    """A fine-tuned target keeps its sizes and often its embedding; its states are other states."""
    first, again, other = (
        store_spec(tiny_target(sharpness=sharpness).model, tap_layers=(0,), max_length=100, target_dtype="float32")
        for sharpness in (1.0, 1.0, 1.1)
    )
    assert first == again
    assert first != other

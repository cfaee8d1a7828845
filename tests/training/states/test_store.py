from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.training.data.rows import DataRow
from dspark.training.states import StateStore, StoreSpec, build_states, store_spec
from tests.training.tiny import HIDDEN, tiny_target


def test_a_store_gives_rows_in_the_asked_order_and_parts_of_them(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    store = build_states(target.model, rows, tmp_path, spec, tokens_per_batch=50, shard_bytes=12_000)
    assert len(store.shards) > 1
    asked = [store.rows[4], store.rows[0], store.rows[4]]
    whole = store.read(asked)
    token_ids = {row.id: list(row.token_ids) for row in rows}
    assert [states.token_ids_S.tolist() for states in whole] == [token_ids[row.id] for row in asked]
    parts = store.read(asked, [10, 1, 1000])
    assert [len(part.taps_ST) for part in parts] == [10, 1, asked[2].length]
    for row, states, part, end in zip(asked, whole, parts, [10, 1, 1000], strict=True):
        assert torch.equal(part.token_ids_S, states.token_ids_S)
        assert torch.equal(part.taps_ST, states.taps_ST[:end])
        assert len(part.hidden_PH) == row.predictions_before(end)
        assert torch.equal(part.hidden_PH, states.hidden_PH[: row.predictions_before(end)])


def test_a_store_serves_any_of_its_layers_in_any_order(
    target: LoadedTarget, rows: list[DataRow], tmp_path: Path
) -> None:
    full = store_spec(target.model, tap_layers=(0, 1, 3), max_length=100, target_dtype="float32", allow_final=True)
    store = build_states(target.model, rows[:2], tmp_path / "full", full)
    for layers in ((3,), (0, 1), (3, 0)):
        expected = replace(full, tap_layers=layers)
        view = StateStore.open(tmp_path / "full", expected)
        alone = build_states(target.model, rows[:2], tmp_path / f"{layers}", expected)
        assert view.spec == alone.spec == expected
        assert view.rows == alone.rows == store.rows
        for seen, own in zip(view.read(view.rows, [30, 100]), alone.read(alone.rows, [30, 100]), strict=True):
            assert seen.taps_ST.shape[1] == len(layers) * HIDDEN
            assert torch.equal(seen.taps_ST, own.taps_ST)
            assert torch.equal(seen.hidden_PH, own.hidden_PH)
            assert torch.equal(seen.log_normaliser_P, own.log_normaliser_P)


def test_damage_is_found_and_named(target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path) -> None:
    build_states(target.model, rows, tmp_path, spec, tokens_per_batch=50, shard_bytes=10_000)
    shard = tmp_path / "shard-00000.safetensors"
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[-10] ^= 1
    shard.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is damaged \(sha256 .* delete the damaged files"):
        StateStore.open(tmp_path, spec)
    StateStore.open(tmp_path, spec, verify=False)
    shard.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"shard-00000.safetensors has \d+ bytes instead of \d+ \(truncated\?\)"):
        StateStore.open(tmp_path, spec, verify=False)
    shard.write_bytes(b"")
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00000.* has 0 bytes .*; .*shard-00001.safetensors is missing: delete"):
        StateStore.open(tmp_path, spec)


@pytest.mark.parametrize("content", ["", "{", '{"format": 1}', '{"format": 1, "spec": {}, "shards": []}', "[1]"])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index.json is damaged .*delete that file and repeat the command"):
        StateStore.open(tmp_path)
    with pytest.raises(ValueError, match="holds no teacher states"):
        StateStore.open(tmp_path / "elsewhere")


def test_damage_that_comes_while_it_is_open(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    store = build_states(target.model, rows[:1], tmp_path, spec)
    (tmp_path / "shard-00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"shard-00000.safetensors cannot be read .*repeat the command"):
        store.read(store.rows)


def test_a_store_of_other_settings_or_rows_is_refused(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    build_states(target.model, rows[:1], tmp_path, spec)
    with pytest.raises(ValueError, match=r"other settings: tap_layers \(0, 2\) \(now \(1, 2\)\)"):
        StateStore.open(tmp_path, replace(spec, tap_layers=(1, 2)))
    other = store_spec(tiny_target(seed=1).model, tap_layers=(0,), max_length=100, target_dtype="float32")
    with pytest.raises(ValueError, match=r"other settings: target_fingerprint \w+ \(now \w+\)\. Give"):
        StateStore.open(tmp_path, other)
    changed = replace(rows[0], token_ids=(*rows[0].token_ids[:-1], 7))
    with pytest.raises(ValueError, match=r"row toy/0-000 is not the one"):
        build_states(target.model, [changed], tmp_path, spec)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        StateStore.open(tmp_path)

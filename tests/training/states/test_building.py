from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark import files
from dspark.files import sha256_file
from dspark.models.loading import LoadedTarget
from dspark.training.data.rows import DataRow
from dspark.training.states import (
    StateStore,
    StoreSpec,
    build_states,
    building,
    check_room,
    estimate_states,
    store_spec,
)
from tests.training.tiny import HIDDEN, tiny_target

SMALL: dict[str, int] = {"tokens_per_batch": 50, "shard_bytes": 10_000}
"""Two rows a shard, one a batch."""


class Killed(BaseException):
    """Stands for a kill between two batches."""


def after(calls: int, act: Callable[[], None]) -> Callable[[int], None]:
    left = calls

    def on_progress(tokens: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            act()

    return on_progress


def raise_killed() -> None:
    raise Killed


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build_and_die(rows: list[DataRow], directory: Path, spec: StoreSpec, batches: int) -> None:
    torch.set_num_threads(1)
    build_states(tiny_target().model, rows, directory, spec, on_progress=after(batches, kill_this_process), **SMALL)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def as_the_first_version(directory: Path) -> None:
    """Turn a store into one of the first version: shards without metadata, an index in another spelling."""
    index = json.loads((directory / "index.json").read_text())
    for shard in index["shards"]:
        path = directory / shard["file"]
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path)
        shard["bytes"] = path.stat().st_size
        shard["sha256"] = sha256_file(path)
    (directory / "index.json").write_text(json.dumps(index))


def test_the_size_is_known_beforehand(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    estimate = estimate_states(rows, tmp_path / "s", spec)
    assert not (tmp_path / "s").exists()
    store = build_states(target.model, rows, tmp_path / "s", spec)
    assert estimate.rows == len(rows)
    assert estimate.tokens == sum(len(row.token_ids) for row in rows)
    assert estimate.predictions == sum(row.predictions for row in store.rows)
    written = sum(shard.bytes for shard in store.shards)
    assert written == pytest.approx(estimate.bytes, rel=0.03)
    done = estimate_states(rows, tmp_path / "s", spec)
    assert (done.rows, done.bytes, done.stored_bytes, done.lost_rows) == (0, 0, written, 0)


def test_a_killed_run_goes_on_after_its_last_shard(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    directory = tmp_path / "s"
    with pytest.raises(Killed):
        build_states(target.model, rows, directory, spec, on_progress=after(4, raise_killed), **SMALL)
    (directory / ".shard-00009.safetensors.12ab34cd.partial").write_bytes(b"half")
    before = {path.name: path.stat().st_mtime_ns for path in directory.glob("shard-*")}
    assert len(before) == 1
    done: list[int] = []
    store = build_states(target.model, rows, directory, spec, on_progress=done.append, **SMALL)
    assert sorted(row.id for row in store.rows) == sorted(row.id for row in rows)
    assert sum(done) == sum(len(row.token_ids) for row in rows[2:])
    assert all((directory / name).stat().st_mtime_ns == time for name, time in before.items())
    assert not list(directory.glob(".*"))


def test_kill_9_at_any_batch_ends_with_the_same_bytes(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    build_states(target.model, rows, tmp_path / "whole", spec, **SMALL)
    context = multiprocessing.get_context("spawn")
    processes = {
        batches: context.Process(target=build_and_die, args=(rows, tmp_path / f"killed-{batches}", spec, batches))
        for batches in (2, 5)
    }
    for process in processes.values():
        process.start()
    for batches, process in processes.items():
        process.join()
        assert process.exitcode == -signal.SIGKILL
        directory = tmp_path / f"killed-{batches}"
        assert len(list(directory.glob("shard-*"))) == (batches - 1) // 2
        build_states(target.model, rows, directory, spec, **SMALL)
        assert contents(directory) == contents(tmp_path / "whole")


@pytest.mark.parametrize("index", ["older than it", "deleted"])
def test_a_shard_that_the_index_lacks_is_taken_up(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path, index: str
) -> None:
    build_states(target.model, rows, tmp_path / "whole", spec, **SMALL)
    directory = tmp_path / "s"
    store = build_states(target.model, rows[:4], directory, spec, **SMALL)
    if index == "older than it":
        building.write_index(directory, spec, store.shards[:1])
    else:
        (directory / "index.json").unlink()
    assert estimate_states(rows, directory, spec).rows == 2
    done: list[int] = []
    build_states(target.model, rows, directory, spec, on_progress=done.append, **SMALL)
    assert len(done) == 2
    assert contents(directory) == contents(tmp_path / "whole")


def test_only_the_rows_of_a_damaged_shard_are_computed_again(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    build_states(target.model, rows, tmp_path, spec, **SMALL)
    whole = contents(tmp_path)
    for damaged in (0, 1, 2):
        path = tmp_path / f"shard-{damaged:05d}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
        before = contents(tmp_path)
        with pytest.raises(
            ValueError, match=f"{path.name} is damaged .*delete the damaged files and repeat the command"
        ):
            build_states(target.model, rows, tmp_path, spec, **SMALL)
        assert contents(tmp_path) == before
        path.unlink()
        estimate = estimate_states(rows, tmp_path, spec)
        assert (estimate.rows, estimate.lost_rows) == (2, 2)
        done: list[int] = []
        build_states(target.model, rows, tmp_path, spec, on_progress=done.append, **SMALL)
        assert len(done) == 2
        assert contents(tmp_path) == whole


def test_a_strange_shard_is_never_overwritten(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    path = tmp_path / "shard-00000.safetensors"
    save_file({"taps": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"shard-00000.* is not in index.json and does not say what it holds: delete"):
        build_states(target.model, rows, tmp_path, spec)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"shard-00000.* is not in index.json and cannot be read .*delete"):
        build_states(target.model, rows, tmp_path, spec)
    path.unlink()
    build_states(target.model, rows[:1], tmp_path, spec)
    (tmp_path / "index.json").unlink()
    with pytest.raises(ValueError, match=r"other settings: max_length 100 \(now 50\)"):
        build_states(target.model, rows, tmp_path, replace(spec, max_length=50))


def test_a_store_grows_with_its_data(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    first = build_states(target.model, rows[:2], tmp_path, spec)
    store = build_states(target.model, rows, tmp_path, spec)
    assert store.rows[:2] == first.rows
    assert len(store.rows) == len(rows)


def test_a_store_of_the_first_version_is_read_and_grows(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    new = build_states(target.model, rows, tmp_path / "new", spec, **SMALL)
    build_states(target.model, rows[:4], tmp_path / "old", spec, **SMALL)
    as_the_first_version(tmp_path / "old")
    old = build_states(target.model, rows, tmp_path / "old", spec, **SMALL)
    assert old.rows == new.rows
    for ours, theirs in zip(old.read(old.rows), new.read(new.rows), strict=True):
        assert torch.equal(ours.taps_ST, theirs.taps_ST)
        assert torch.equal(ours.log_normaliser_P, theirs.log_normaliser_P)


def test_a_store_of_more_layers_stays_whole(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    full = store_spec(target.model, tap_layers=(0, 2, 3), max_length=100, target_dtype="float32", allow_final=True)
    build_states(target.model, rows[:2], tmp_path, full)
    part = replace(full, tap_layers=(2,))
    assert estimate_states(rows, tmp_path, part).bytes == pytest.approx(
        2 * estimate_states(rows[:2], tmp_path / "new", full).bytes
    )
    view = build_states(target.model, rows, tmp_path, part)
    assert view.spec == part
    assert [states.taps_ST.shape[1] for states in view.read(view.rows)] == [HIDDEN] * 6
    whole = StateStore.open(tmp_path, full)
    assert len(whole.rows) == 6
    for seen, all_layers in zip(view.read(view.rows), whole.read(view.rows), strict=True):
        assert torch.equal(seen.taps_ST, all_layers.taps_ST[:, HIDDEN : 2 * HIDDEN])


def test_a_budget_is_kept(target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path) -> None:
    need = estimate_states(rows, tmp_path / "s", spec)
    with pytest.raises(
        ValueError,
        match=r"of 6 rows need 0\.0 GiB in .* states\.max_gib allows 0\.0 GiB: .*fewer rows.*states\.source=online",
    ):
        build_states(target.model, rows, tmp_path / "s", spec, max_bytes=need.bytes - 1)
    assert list((tmp_path / "s").iterdir()) == []
    build_states(target.model, rows, tmp_path / "s", spec, max_bytes=need.bytes)
    more = [replace(rows[0], id="more")]
    with pytest.raises(ValueError, match=r"of 1 rows need .* with what is there"):
        build_states(target.model, [*rows, *more], tmp_path / "s", spec, max_bytes=need.bytes)
    build_states(target.model, rows, tmp_path / "s", spec, max_bytes=1)
    gib = 2**30
    with pytest.raises(ValueError, match=r"need 2\.0 GiB in .*, 3\.5 GiB with what is there, .* allows 3\.0 GiB"):
        check_room(replace(need, bytes=2 * gib, stored_bytes=3 * gib // 2), tmp_path, 3 * gib)


def test_a_full_disk_is_refused_before_anything_is_computed(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(OSError, match=r"need .* GiB in .*free.*use fewer rows"):
        build_states(target.model, rows, tmp_path, spec)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"need .* GiB in .*free"):
        check_room(estimate_states(rows, tmp_path / "a" / "b", spec), tmp_path / "a" / "b", None)


def test_a_disk_that_fills_up_costs_one_shard(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_states(target.model, rows, tmp_path / "whole", spec, **SMALL)
    directory = tmp_path / "s"
    fsync_file = files.fsync_file

    def full(path: Path) -> None:
        if "shard-00002" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync_file(path)

    monkeypatch.setattr(files, "fsync_file", full)
    with pytest.raises(
        OSError, match=r"shard-00002\.safetensors could not be written \(No space left.*states of 4 rows are finished"
    ) as caught:
        build_states(target.model, rows, directory, spec, **SMALL)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(contents(directory)) == ["index.json", "shard-00000.safetensors", "shard-00001.safetensors"]
    assert len(StateStore.open(directory, spec).rows) == 4
    monkeypatch.undo()
    build_states(target.model, rows, directory, spec, **SMALL)
    assert contents(directory) == contents(tmp_path / "whole")


def test_long_rows_are_cut_and_rows_without_labels_left_out(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    short = replace(spec, max_length=20)
    mute = replace(rows[1], id="mute", response_spans=((19, 30),), finish_reasons=("length",))
    store = build_states(target.model, [rows[0], mute], tmp_path, short)
    (stored,) = store.rows
    assert stored.length == 20
    assert stored.response_spans == ((4, 20),)
    (states,) = store.read([stored])
    assert len(states.taps_ST) == 20
    assert len(states.hidden_PH) == 15


def test_a_store_without_rows(target: LoadedTarget, spec: StoreSpec, tmp_path: Path) -> None:
    assert build_states(target.model, [], tmp_path, spec).rows == ()
    assert StateStore.open(tmp_path, spec).read([]) == []


def test_only_one_process_writes_and_only_its_own_leftovers_go(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    """Two writers would number their shards alike, and one would then read the states of the other's rows."""
    (tmp_path / ".bashrc").write_text("not ours")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".shard-00007.safetensors.0123abcd.partial").write_bytes(b"half")

    def meanwhile(tokens: int) -> None:
        with pytest.raises(BlockingIOError, match="another process is writing"):
            build_states(target.model, rows[::-1], tmp_path, spec)

    build_states(target.model, rows, tmp_path, spec, tokens_per_batch=50, on_progress=meanwhile)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".bashrc", ".git"]
    build_states(target.model, rows, tmp_path, spec)


def test_a_finished_store_is_not_written_to(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    build_states(target.model, rows, tmp_path, spec)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.iterdir())}
    build_states(target.model, rows, tmp_path, spec)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_share_the_shards(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path, world_size: int
) -> None:
    build_states(target.model, rows, tmp_path / "alone", spec, **SMALL)
    barrier = threading.Barrier(world_size, timeout=60)
    done: list[list[int]] = [[] for _ in range(world_size)]

    def build(rank: int) -> StateStore:
        options: dict[str, Any] = {**SMALL, "rank": rank, "world_size": world_size, "barrier": barrier.wait}
        return build_states(target.model, rows, tmp_path / "shared", spec, on_progress=done[rank].append, **options)

    with ThreadPoolExecutor(world_size) as pool:
        stores = list(pool.map(build, range(world_size)))
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert all(len(batches) >= 2 for batches in done)
    assert sum(len(batches) for batches in done) == len(rows)
    assert all([asdict(row) for row in store.rows] == [asdict(row) for row in stores[0].rows] for store in stores)


def test_shards_of_a_killed_process_are_kept(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, tmp_path: Path
) -> None:
    """The second of two processes finishes its shard; the first dies before it can write that into the index."""
    build_states(target.model, rows, tmp_path / "alone", spec, **SMALL)
    barrier = threading.Barrier(2, timeout=60)
    directory = tmp_path / "shared"

    def build(rank: int) -> None:
        die = after(1, raise_killed) if rank == 0 else None
        options: dict[str, Any] = {**SMALL, "rank": rank, "world_size": 2, "barrier": barrier.wait}
        try:
            build_states(target.model, rows, directory, spec, on_progress=die, **options)
        except Killed:
            deadline = time.monotonic() + 60
            while not (directory / "shard-00001.safetensors").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            barrier.abort()
        except threading.BrokenBarrierError:
            assert rank == 1

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, range(2)))
    assert sorted(contents(directory)) == ["shard-00001.safetensors"]
    done: list[int] = []
    build_states(target.model, rows, directory, spec, on_progress=done.append, **SMALL)
    assert len(done) == 4
    assert contents(directory) == contents(tmp_path / "alone")

"""Filling a store: what is missing, what it costs, and computing it in a way that survives a kill at any moment.

The missing rows, in the order of the data, are cut into the shards they will make before anything is computed. A shard
is the unit of work: it appears whole or not at all, and it depends on nothing but its rows. So a killed run goes on
after its last shard and ends with the same bytes as an uninterrupted one, a damaged shard can be computed alone, and
several processes can share the shards among them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from dspark.files import exclusive, remove_leftovers
from dspark.models.target import Target
from dspark.training.data.rows import DataRow
from dspark.training.states.compute import RowTokens, compute_states, length_batches
from dspark.training.states.spec import RowStates, StoredRow, StoreSpec, stored_row
from dspark.training.states.store import (
    INDEX_FILE,
    SHARD_PATTERN,
    Shard,
    StateStore,
    check_spec,
    damage_message,
    read_index,
    shard_from_file,
    write_index,
    write_shard,
)

__all__ = ["StoreEstimate", "build_states", "check_room", "estimate_states"]

_DISK_RESERVE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StoreEstimate:
    """What computing the missing states costs.

    Attributes:
        rows: rows to compute, ``tokens`` tokens with ``predictions`` predicting positions.
        bytes: what they will take on the disk.
        stored_bytes: what the directory holds already.
        lost_rows: how many of the rows were computed before, in shards that are gone.
    """

    rows: int
    tokens: int
    predictions: int
    bytes: int
    stored_bytes: int = 0
    lost_rows: int = 0


def estimate_states(rows: Sequence[DataRow], directory: Path, spec: StoreSpec) -> StoreEstimate:
    """What ``build_states`` would add to ``directory``. Nothing is written.

    Raises:
        ValueError: the store belongs to another target or setting.
    """
    stored, shards = _find(directory, spec)
    there = [shard for shard in shards if (directory / shard.file).exists()]
    return _estimate(_missing(rows, directory, stored, there), stored, shards, there)


def check_room(estimate: StoreEstimate, directory: Path, max_bytes: int | None) -> None:
    """Refuse what would exceed the budget or fill the disk.

    Args:
        estimate: of ``estimate_states``.
        directory: of the store; need not exist.
        max_bytes: most bytes that the store may take in all; None for no budget.

    Raises:
        ValueError: the budget is too small.
        OSError: the disk is.
    """
    if estimate.rows == 0:
        return
    need = f"teacher states of {estimate.rows:,} rows need {_gib(estimate.bytes)} GiB in {directory}"
    total = estimate.stored_bytes + estimate.bytes
    if max_bytes is not None and total > max_bytes:
        raise ValueError(
            f"{need}, {_gib(total)} GiB with what is there, but states.max_gib allows {_gib(max_bytes)} GiB: use fewer "
            "rows or fewer tap layers, raise states.max_gib, or set states.source=online, which keeps nothing"
        )
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if estimate.bytes + _DISK_RESERVE_BYTES > free:
        raise OSError(
            f"{need}, which has {_gib(free)} GiB free (1 GiB is kept): use fewer rows, fewer tap layers, another "
            "states.directory, or states.source=online"
        )


def build_states(
    target: Target,
    rows: Sequence[DataRow],
    directory: Path,
    spec: StoreSpec,
    *,
    tokens_per_batch: int = 2048,
    shard_bytes: int = 64 << 20,
    max_bytes: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> StateStore:
    """Compute the states of all rows that ``directory`` lacks, then open it.

    A store of more tap layers than ``spec`` has stays whole: rows that it lacks get all of its layers.

    Args:
        target: gives the states.
        rows: the data set. Rows without two response tokens in a span (after the cut at ``max_length``) are left out.
        directory: of the store; made if it is not there.
        spec: of the store (``store_spec``).
        tokens_per_batch: tokens of one target pass.
        shard_bytes: size of a shard (at least one full batch), i.e. how much a kill can cost.
        max_bytes: most bytes that the store may take in all; None for no budget.
        on_progress: called with the number of tokens done after every batch (of this process).
        rank: of this process among ``world_size`` that build the same store together, each its part of the shards.
        world_size: their number.
        barrier: called four times by each of them; returns when all have called it.

    Raises:
        ValueError: the store belongs to another target or setting, a row changed, a shard is damaged, or the budget is
            too small.
        OSError: the disk has not enough room, or another process writes to the store. What was finished stays.
    """
    with exclusive(directory) if rank == 0 else nullcontext():
        if rank == 0:
            _recover(directory, spec)
        barrier()
        stored, shards = _find(directory, spec)
        missing = _missing(rows, directory, stored, shards)
        check_room(_estimate(missing, stored, shards, shards), directory, max_bytes)
        plan = list(zip(_free_numbers(shards), _cut(missing, stored, shard_bytes, tokens_per_batch), strict=False))
        barrier()  # nobody writes before everybody has planned
        for number, work in plan[rank::world_size]:
            row_states = _compute(target, work, stored, tokens_per_batch, on_progress)
            try:
                shards.append(write_shard(directory, number, stored, *row_states))
                if rank == 0:
                    write_index(directory, stored, shards)
            except OSError as error:
                raise _interrupted(error, shards) from error
        barrier()
        if rank == 0 and (plan or not (directory / INDEX_FILE).exists()):
            write_index(directory, stored, _find(directory, spec)[1])
        barrier()
    return StateStore.open(directory, spec, verify=False)


def _recover(directory: Path, spec: StoreSpec) -> None:
    """Check all shards, bring the index up to what is there, and take away what killed writers left.

    Raises:
        ValueError: a shard is damaged. Missing ones are dropped from the index, so that they are computed anew.
    """
    remove_leftovers(directory, SHARD_PATTERN)
    remove_leftovers(directory, INDEX_FILE)
    stored, shards = _find(directory, spec)
    there = [shard for shard in shards if (directory / shard.file).exists()]
    damage = [text for shard in there if (text := shard.damage(directory, verify=True)) is not None]
    if damage:
        raise ValueError(damage_message(damage))
    if there != _indexed(directory, spec)[1]:
        write_index(directory, stored, there)


def _find(directory: Path, spec: StoreSpec) -> tuple[StoreSpec, list[Shard]]:
    """Spec on disk (``spec`` for a new store) and all shards, named by the index or by themselves.

    Raises:
        ValueError: the store was made for something else, or a shard that the index lacks cannot be read.
    """
    stored, shards = _indexed(directory, spec)
    named = {shard.file for shard in shards}
    for path in sorted(directory.glob(SHARD_PATTERN)):
        if path.name not in named:
            its_spec, shard = shard_from_file(path)
            check_spec(directory, its_spec, spec)
            if its_spec != (stored or its_spec):
                raise ValueError(f"{path} does not belong to the other shards in {directory}: delete that file")
            stored = its_spec
            shards.append(shard)
    return stored or spec, sorted(shards, key=lambda shard: shard.file)


def _indexed(directory: Path, spec: StoreSpec) -> tuple[StoreSpec | None, list[Shard]]:
    """Spec and shards of the index, or neither when there is no index."""
    return read_index(directory, spec) if (directory / INDEX_FILE).exists() else (None, [])


def _missing(rows: Sequence[DataRow], directory: Path, spec: StoreSpec, shards: Sequence[Shard]) -> list[RowTokens]:
    """Rows that have something to predict and are in no shard, in the order of the data.

    Raises:
        ValueError: a row is another one than that of the same id in the store, or before it in ``rows``.
    """
    present = {row.id: row for shard in shards for row in shard.rows}
    missing: list[RowTokens] = []
    for row in rows:
        stored = stored_row(row, spec)
        if row.id not in present:
            present[row.id] = stored
            if stored.predictions:
                missing.append(RowTokens(row=stored, token_ids=row.token_ids, end=stored.length))
        elif present[row.id].digest != stored.digest:
            raise ValueError(
                f"row {row.id} is not the one whose states {directory} holds: delete that directory, "
                "or give row ids that are unique and stable"
            )
    return missing


def _estimate(
    missing: Sequence[RowTokens], spec: StoreSpec, shards: Sequence[Shard], there: Sequence[Shard]
) -> StoreEstimate:
    kept = {shard.file for shard in there}
    lost = {row.id for shard in shards if shard.file not in kept for row in shard.rows}
    return StoreEstimate(
        rows=len(missing),
        tokens=sum(item.row.length for item in missing),
        predictions=sum(item.row.predictions for item in missing),
        bytes=sum(_bytes(item.row, spec) for item in missing),
        stored_bytes=sum(shard.bytes for shard in there),
        lost_rows=sum(item.row.id in lost for item in missing),
    )


def _bytes(row: StoredRow, spec: StoreSpec) -> int:
    """Size of a row's states: bfloat16 taps and hidden states, 4-byte token ids, log-normalisers and argmaxes."""
    taps = 2 * spec.hidden_size * len(spec.tap_layers)
    return row.length * (taps + 4) + row.predictions * (2 * spec.hidden_size + 8)


def _cut(
    missing: Sequence[RowTokens], spec: StoreSpec, shard_bytes: int, tokens_per_batch: int
) -> Iterator[list[RowTokens]]:
    """The rows of each shard to come."""
    shard: list[RowTokens] = []
    size = tokens = 0
    for item in missing:
        shard.append(item)
        size += _bytes(item.row, spec)
        tokens += item.row.length
        if size >= shard_bytes and tokens >= tokens_per_batch:
            yield shard
            shard, size, tokens = [], 0, 0
    if shard:
        yield shard


def _compute(
    target: Target,
    work: Sequence[RowTokens],
    spec: StoreSpec,
    tokens_per_batch: int,
    on_progress: Callable[[int], None] | None,
) -> tuple[list[StoredRow], list[RowStates]]:
    rows: list[StoredRow] = []
    states: list[RowStates] = []
    for batch in length_batches(work, tokens_per_batch):
        rows += [item.row for item in batch]
        states += compute_states(target, batch, spec)
        if on_progress is not None:
            on_progress(sum(item.row.length for item in batch))
    return rows, states


def _free_numbers(shards: Sequence[Shard]) -> Iterator[int]:
    """Numbers of shards to come: those that no shard has."""
    taken = {shard.file for shard in shards}
    number = 0
    while True:
        if f"shard-{number:05d}.safetensors" not in taken:
            yield number
        number += 1


def _interrupted(error: OSError, finished: Sequence[Shard]) -> OSError:
    """``error``, with what is kept and what to do."""
    kept = sum(len(shard.rows) for shard in finished)
    advice = f"the states of {kept:,} rows are finished and kept: make room, then repeat the command"
    if error.errno is None:
        return OSError(f"{error}; {advice}")
    return OSError(error.errno, f"{error.strerror}; {advice}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"

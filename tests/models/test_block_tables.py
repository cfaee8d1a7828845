"""Tables of blocks, and the caches over them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dspark.models.block_tables import BlockTables
from dspark.models.kv_cache import KVCache
from dspark.types import Segment

CPU = torch.device("cpu")


def scattered() -> BlockTables:
    tables = BlockTables(num_slots=3, max_length=60, num_blocks=9, device=CPU)
    tables.assign(0, [7, 2, 5])
    tables.assign(2, [4])
    return tables


def make_cache(tables: BlockTables | None = None, **changes: Any) -> KVCache:
    sizes = {"num_layers": 2, "num_slots": 3, "num_kv_heads": 1, "max_length": 50, "head_dim": 4} | changes
    return KVCache(**sizes, dtype=torch.float32, device=CPU, tables=tables)


def rows_of(tables: BlockTables, segments: list[Segment]) -> list[int]:
    """Rows of the places, whatever their form."""
    return torch.arange(tables.num_rows)[tables.places(segments).rows].tolist()


def test_a_position_is_found_in_its_block() -> None:
    tables = scattered()
    assert tables.tables_SB.shape == (3, 4)
    assert [tables.capacity(slot) for slot in range(3)] == [48, 0, 16]
    places = tables.places([Segment(2, 14, 2), Segment(0, 15, 3)])
    assert places.slots_N.tolist() == [2, 2, 0, 0, 0]
    assert places.positions_N.tolist() == [14, 15, 15, 16, 17]
    assert places.last_position == 17
    assert rows_of(tables, [Segment(2, 14, 2), Segment(0, 15, 3)]) == [78, 79, 127, 32, 33]
    assert rows_of(tables, [Segment(0, 31, 2)]) == [47, 80]
    assert tables.slot_rows([0, 2], 18)[0].tolist() == [*range(112, 128), 32, 33]
    assert tables.slot_rows([0, 2], 18)[1, :16].tolist() == [*range(64, 80)]


def test_blocks_in_a_row_are_a_slice() -> None:
    tables = scattered()
    assert tables.first_row(0) is None
    assert tables.first_row(1) is None
    assert tables.first_row(2) == 64
    assert tables.places([Segment(2, 3, 5)]).rows == slice(67, 72)
    tables.assign(2, [4, 5])
    assert tables.places([Segment(2, 3, 20)]).rows == slice(67, 87)
    tables.assign(2, [4, 5, 3])
    assert rows_of(tables, [Segment(2, 31, 2)]) == [95, 48]


def test_what_is_assigned_is_all_that_a_slot_has() -> None:
    tables = scattered()
    for blocks in ([7, 2, 5, 0], [7, 2], [1, 2], [], [3]):
        tables.assign(0, blocks)
        assert tables.capacity(0) == 16 * len(blocks)
        assert tables.tables_SB[0, : len(blocks)].tolist() == blocks
        assert tables.tables_SB[2, 0] == 4


def test_places_are_looked_up_anew_when_blocks_change_hands() -> None:
    tables = BlockTables(num_slots=3, max_length=40, num_blocks=9, device=torch.device("cpu"))
    tables.assign(2, [4, 1])
    segments = [Segment(2, 3, 5)]
    assert tables.places(segments).row_numbers.tolist() == [4 * 16 + p for p in range(3, 8)]
    assert tables.places(segments) is tables.places(list(segments))
    tables.assign(2, [8])
    assert tables.places(segments).row_numbers.tolist() == [8 * 16 + p for p in range(3, 8)]


def test_contiguous_slots_own_their_blocks() -> None:
    tables = BlockTables.contiguous(3, 20, CPU)
    assert tables.num_blocks == 6
    assert tables.tables_SB.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert [tables.first_row(slot) for slot in range(3)] == [0, 32, 64]
    assert [tables.capacity(slot) for slot in range(3)] == [32, 32, 32]


def test_impossible_assignments_are_refused() -> None:
    tables = scattered()
    with pytest.raises(ValueError, match="slot 3 does not exist; the tables have slots 0 to 2"):
        tables.assign(3, [1])
    with pytest.raises(ValueError, match=r"slot 0: blocks \[9, -1\] are not in the memory's 0 to 8"):
        tables.assign(0, [7, 9, 1, -1])
    with pytest.raises(ValueError, match="slot 0 would get 5 blocks, its max_length 60 needs no more than 4"):
        tables.assign(0, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="at least one slot, position and block; got num_slots=0"):
        BlockTables(num_slots=0, max_length=1, num_blocks=1, device=CPU)
    assert tables.capacity(0) == 48


def test_a_cache_has_room_for_its_blocks_and_no_more() -> None:
    tables = scattered()
    cache = make_cache(tables)
    assert cache.keys.shape == (2, 1, 144, 4)
    assert cache.nbytes_per_block == 2 * (2 * 1 * 16 * 4) * 4
    with pytest.raises(ValueError, match=r"slot 2: position 16 is beyond the cache's 16 positions for it"):
        cache.reserve([Segment(0, 0, 10), Segment(2, 0, 17)])
    with pytest.raises(ValueError, match=r"slot 1: position 0 is beyond the cache's 0 positions for it"):
        cache.reserve([Segment(1, 0, 1)])
    assert cache.lengths == [0, 0, 0]
    tables.assign(0, [7, 2, 5, 0])
    with pytest.raises(ValueError, match="slot 0: position 50 is beyond the cache's 50 positions for it"):
        cache.reserve([Segment(0, 0, 51)])
    cache.reserve([Segment(0, 0, 50)])
    assert cache.lengths == [50, 0, 0]


def test_positions_of_shared_blocks_are_adopted() -> None:
    tables = scattered()
    cache = make_cache(tables)
    with pytest.raises(ValueError, match="cannot adopt 17 positions in slot 2: it has room for 16"):
        cache.adopt(2, 17)
    tables.assign(2, [7, 2, 8])
    cache.adopt(2, 32)
    assert cache.lengths == [0, 0, 32]
    cache.reserve([Segment(2, 32, 1)])
    cache.truncate(2, 32)
    assert cache.lengths == [0, 0, 32]


@pytest.mark.parametrize("changes", [{"num_slots": 2}, {"max_length": 61}, {"scratch": 11}])
def test_tables_of_other_sizes_are_refused(changes: dict[str, int]) -> None:
    asked = {"num_slots": 3, "max_length": 50, "scratch": 0} | changes
    needs = f"needs {asked['num_slots']} of at least {asked['max_length'] + asked['scratch']}"
    with pytest.raises(ValueError, match=re.escape(f"tables have 3 slots of 60 positions; the cache {needs}")):
        make_cache(scattered(), **changes)


@pytest.mark.parametrize("segment", [Segment(3, 0, 1), Segment(-1, 0, 1), Segment(0, 79, 2), Segment(0, -1, 1)])
def test_places_outside_the_tables_are_an_error(segment: Segment) -> None:
    tables = BlockTables.contiguous(num_slots=3, max_length=80, device=torch.device("cpu"))
    with pytest.raises(IndexError, match=r"outside the tables \(3, 5\)"):
        tables.places([Segment(1, 0, 2), segment])


@pytest.mark.parametrize("segments", [[], [Segment(0, 0, -9), Segment(1, 0, 10)]])
def test_segments_that_hold_no_tokens_have_no_places(segments: list[Segment]) -> None:
    tables = BlockTables.contiguous(num_slots=3, max_length=80, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="are none"):
        tables.places(segments)

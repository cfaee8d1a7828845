"""Memory for weights."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any

import pytest
import torch

from dspark.models import large_pages
from dspark.models.large_pages import weight_room


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """All memory that is mapped from now on, by rooms that begin anew."""
    maps: list[weakref.ref[Any]] = []

    class Mapped(mmap.mmap):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            maps.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(large_pages, "_ROOMS", large_pages._Rooms())
    return maps


def test_rooms_begin_with_a_line_and_do_not_overlap() -> None:
    rooms = [weight_room(size) for size in (1, 100, 64, 17 << 20, 3, 5 << 20, 5 << 20, 7 << 20)]
    for number, room in enumerate(rooms):
        room.fill_(number)
    for number, room in enumerate(rooms):
        assert room.data_ptr() % 64 == 0
        assert bool((room == number).all())


@pytest.mark.parametrize("lacks", ["the constant", "the call"])
def test_a_system_without_large_pages_gives_small_ones(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapped(mmap.mmap):
        def madvise(self, *arguments: Any) -> None:
            raise OSError("invalid argument")

    if lacks == "the constant":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(large_pages, "_ROOMS", large_pages._Rooms())
    room = weight_room(1000)
    assert room.data_ptr() % 64 == 0
    assert room.fill_(7).sum() == 7000


def test_memory_goes_when_nobody_knows_a_part_of_it_any_more(
    maps: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = [weight_room(12 << 20), weight_room(1 << 20), weight_room(12 << 20)]
    assert [reference() is None for reference in maps] == [False, False]
    del rooms[0]
    gc.collect()
    assert [reference() is None for reference in maps] == [False, False]
    del rooms[0]
    monkeypatch.setattr(large_pages, "_ROOMS", large_pages._Rooms())
    gc.collect()
    assert [reference() is None for reference in maps] == [True, False]


def test_what_is_left_of_a_large_chunk_does_not_keep_it(maps: list[weakref.ref[Any]]) -> None:
    room = weight_room(41 << 20)
    assert room.sum() == 0
    del room
    gc.collect()
    assert [reference() is None for reference in maps] == [True]


def test_a_model_made_in_inference_mode_leaves_memory_that_others_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_ROOMS", large_pages._Rooms())
    with torch.inference_mode():
        weight_room(100)
    weight_room(100).fill_(1)

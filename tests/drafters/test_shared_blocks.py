"""A drafter's memory in blocks that somebody else deals out, and shares between requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dspark.drafters import DrafterCache, DSparkDrafter, TrainableDrafter, greedy_sampler
from dspark.models.block_tables import BlockTables
from tests.drafters.conftest import VARIANTS, Context
from tests.drafters.test_kinds import CLOSE, Forced, extend, fill, forced_logits

DrafterOf = Callable[..., TrainableDrafter]
ContextOf = Callable[[TrainableDrafter, int], Context]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_tables(blocks: dict[int, list[int]]) -> BlockTables:
    tables = BlockTables(num_slots=4, max_length=64, num_blocks=12, device=torch.device("cpu"))
    for slot, owned in blocks.items():
        tables.assign(slot, owned)
    return tables


def new_cache(drafter: TrainableDrafter, tables: BlockTables) -> DrafterCache:
    return drafter.new_cache(4, 64 - drafter.block_size - 1, tables)


@each_variant
def test_rows_in_scattered_blocks_equal_rows_alone(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = drafter_of(variant)
    contexts = {2: context_of(drafter, 30), 0: context_of(drafter, 3), 3: context_of(drafter, 47)}
    cache = new_cache(drafter, make_tables({2: [9, 1, 4], 0: [0], 3: [11, 2, 7, 8]}))
    extend(drafter, cache, {slot: (0, context.cut(0, 20)) for slot, context in contexts.items()})
    extend(drafter, cache, {slot: (20, contexts[slot].cut(20)) for slot in (3, 2)})
    columns, anchors = torch.tensor([[3, 1, 4, 1]])[:, : drafter.block_size], torch.tensor([7, 50, 1])
    together = Forced(columns.expand(3, -1), drafter.draft_token_ids_D)
    block = drafter.propose(cache, list(contexts), anchors, together)
    for row, slot in enumerate(contexts):
        single = fill(drafter, {0: contexts[slot]}, 1, 47)
        alone = Forced(columns, drafter.draft_token_ids_D)
        expected = drafter.propose(single, [0], anchors[row : row + 1], alone)
        torch.testing.assert_close(together.logits_RGD[row], alone.logits_RGD[0], **CLOSE)
        if expected.confidence_logits_RG is not None:
            assert block.confidence_logits_RG is not None
            torch.testing.assert_close(block.confidence_logits_RG[row], expected.confidence_logits_RG[0], **CLOSE)


@each_variant
def test_a_shared_prefix_serves_both_and_neither_disturbs_the_other(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    """What stands in a shared block must not depend on the first token behind it, which differs."""
    drafter = drafter_of(variant)
    first, rest = context_of(drafter, 40), context_of(drafter, 9)
    rest.tokens_N[0] = (first.tokens_N[32] + 1) % 53
    tables = make_tables({1: [5, 3, 8]})
    cache = new_cache(drafter, tables)
    extend(drafter, cache, {1: (0, first)})
    before = forced_logits(drafter, cache, 1, 9)
    tables.assign(2, [5, 3, 0])
    cache.adopt(2, 32)
    extend(drafter, cache, {2: (32, rest)})
    fresh = fill(drafter, {0: first.cut(0, 32) + rest}, 1, 50)
    torch.testing.assert_close(forced_logits(drafter, cache, 2, 9), forced_logits(drafter, fresh, 0, 9), **CLOSE)
    assert torch.equal(forced_logits(drafter, cache, 1, 9), before)


@each_variant
def test_memory_without_room_is_refused(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = drafter_of(variant)
    inputs = drafter.block_size
    tables = make_tables({1: [5]})
    cache = new_cache(drafter, tables)
    with pytest.raises(ValueError, match="slot 1: position 16 is beyond the cache's 16 positions for it"):
        extend(drafter, cache, {1: (0, context_of(drafter, 17))})
    extend(drafter, cache, {1: (0, context_of(drafter, 16))})
    message = f"slot 1 has room for 16 positions, its block of {inputs} needs {16 + inputs}: give the slot more blocks"
    with pytest.raises(ValueError, match=message):
        drafter.propose(cache, [1], torch.tensor([1]), greedy_sampler)
    tables.assign(1, [5, 6])
    drafter.propose(cache, [1], torch.tensor([1]), greedy_sampler)
    with pytest.raises(ValueError, match=f"tables have 4 slots of 64 positions; .* at least {64 + inputs}"):
        drafter.new_cache(4, 64, tables)


@each_variant
def test_bytes_of_a_block_are_those_of_all_its_memory(variant: str, drafter_of: DrafterOf) -> None:
    cache = new_cache(drafter_of(variant), make_tables({}))
    memory = sum(tensor.nbytes for tensor in (cache.keys, cache.values, cache.features))
    assert cache.nbytes_per_block * 12 == memory
    assert (cache.features.nbytes > 0) is (variant in ("eagle3", "mtp"))


def change_hands(drafter: TrainableDrafter, cache: DrafterCache, first: Context, second: Context) -> None:
    """Slot 0, which holds ``first`` in blocks 4 and 2, loses tokens to others and ends; slot 1 begins in its blocks."""
    cache.truncate(0, 5)
    extend(drafter, cache, {0: (5, first.cut(9, 11))})
    cache.tables.assign(0, [])
    cache.truncate(0, 0)
    cache.tables.assign(1, [2, 4, 7])
    extend(drafter, cache, {1: (0, second.cut(0, 33))})


@pytest.mark.parametrize("variant", ["vanilla", "none"])
def test_context_that_waits_is_written_where_it_belonged_and_to_whom_it_belongs_now(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing drafts while a block's tokens are rejected, the block changes hands, and a third slot adopts it."""
    monkeypatch.setattr("dspark.drafters.decoding.MOST_WAITING", 10_000)
    drafter = drafter_of(variant)
    first, second = context_of(drafter, 20), context_of(drafter, 37)
    tables = make_tables({0: [4, 2]})
    cache = new_cache(drafter, tables)
    extend(drafter, cache, {0: (0, first)})
    change_hands(drafter, cache, first, second)
    tables.assign(2, [2, 4, 6])
    cache.adopt(2, 32)
    extend(drafter, cache, {2: (32, second.cut(32))})
    assert cache.num_waiting == 20 + 2 + 33 + 5
    fresh = fill(drafter, {0: second}, 1, 50)
    torch.testing.assert_close(forced_logits(drafter, cache, 2, 9), forced_logits(drafter, fresh, 0, 9), **CLOSE)
    assert cache.num_waiting == 0


def test_context_does_not_wait_without_end(
    drafter_of: DrafterOf, context_of: ContextOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.drafters.decoding.MOST_WAITING", 8)
    drafter = drafter_of("vanilla")
    context = context_of(drafter, 12)
    cache = new_cache(drafter, make_tables({3: [1]}))
    for start, waiting in ((0, 3), (3, 6), (6, 0), (9, 3)):
        extend(drafter, cache, {3: (start, context.cut(start, start + 3))})
        assert cache.num_waiting == waiting
    fresh = fill(drafter, {0: context}, 1, 50)
    torch.testing.assert_close(forced_logits(drafter, cache, 3, 9), forced_logits(drafter, fresh, 0, 9), **CLOSE)


def test_context_still_waits_after_an_error(
    drafter_of: DrafterOf, context_of: ContextOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine goes on after an error, and prefixes that were computed before it serve others."""
    drafter = drafter_of("vanilla")
    assert isinstance(drafter, DSparkDrafter)
    context = context_of(drafter, 12)
    cache = new_cache(drafter, make_tables({3: [1]}))
    extend(drafter, cache, {3: (0, context)})

    def fail(taps_NT: torch.Tensor) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(drafter._computation, "context", fail)
        with pytest.raises(MemoryError):
            forced_logits(drafter, cache, 3, 9)
    fresh = fill(drafter, {0: context}, 1, 50)
    torch.testing.assert_close(forced_logits(drafter, cache, 3, 9), forced_logits(drafter, fresh, 0, 9), **CLOSE)

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import config

from dspark.models import attention_kernel
from dspark.models.attention_kernel import attend_rows, is_available
from dspark.models.block_tables import BLOCK_SIZE
from dspark.models.instructions import has_dot_products
from dspark.models.kv_cache import columns_shape

NUM_SLOTS, NUM_BLOCKS = 3, 12  # a slot holds 192 positions: three tiles of the kernel
LENGTH = NUM_BLOCKS * BLOCK_SIZE
SCALE = 0.17
needs_instructions = pytest.mark.skipif(not has_dot_products(), reason="float16 is for processors with AVX2")
either = pytest.mark.parametrize(
    "is_half", [False, pytest.param(True, marks=needs_instructions)], ids=["float32", "float16"]
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    keys_gPD: torch.Tensor
    values_gPD: torch.Tensor
    tables_SB: torch.Tensor
    is_half: bool = False

    def attend(
        self,
        q_NhD: torch.Tensor,
        slots_N: list[int] | torch.Tensor,
        visible_N: list[int] | torch.Tensor,
        *,
        window: int | None = None,
        first: int = 0,
    ) -> torch.Tensor:
        slots_N, visible_N = torch.as_tensor(slots_N), torch.as_tensor(visible_N)
        memory = (self.keys_gPD, self.values_gPD)
        if self.is_half:
            keys = as_columns(self.keys_gPD).half()
            assert keys.shape == columns_shape(self.keys_gPD.shape)
            memory = (keys, self.values_gPD.half())
        return attend_rows(q_NhD, *memory, self.tables_SB, slots_N, visible_N, scale=SCALE, window=window, first=first)

    def rows(self, slot: int) -> torch.Tensor:
        positions = torch.arange(LENGTH)
        return self.tables_SB[slot].long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def as_columns(keys_gPD: torch.Tensor) -> torch.Tensor:
    return keys_gPD.unflatten(1, (-1, BLOCK_SIZE)).transpose(2, 3).contiguous()


def make_memory(
    *, kv_heads: int = 1, head_dim: int = 16, spread: float = 1.0, seed: int = 0, is_half: bool = False
) -> Memory:
    """Random keys and values in blocks that lie anyhow, with a block to spare; float16 numbers if ``is_half``."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(NUM_SLOTS * NUM_BLOCKS + 1, generator=generator)[:-1]
    shape = (kv_heads, (NUM_SLOTS * NUM_BLOCKS + 1) * BLOCK_SIZE, head_dim)
    dtype = torch.float16 if is_half else torch.float32
    return Memory(
        keys_gPD=(torch.randn(shape, generator=generator) * spread).to(dtype).float(),
        values_gPD=torch.randn(shape, generator=generator).to(dtype).float(),
        tables_SB=blocks.view(NUM_SLOTS, NUM_BLOCKS).int(),
        is_half=is_half,
    )


def make_queries(count: int, *, heads: int = 3, head_dim: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def expected(
    memory: Memory, q_NhD: torch.Tensor, slots_N: list[int], visible_N: list[int], window: int | None, first: int
) -> torch.Tensor:
    group = q_NhD.shape[1] // len(memory.keys_gPD)
    out = []
    for q_hD, slot, visible in zip(q_NhD.double(), slots_N, visible_N, strict=True):
        begin = first if window is None else max(first, visible - window)
        rows = memory.rows(slot)[begin:visible]
        k_hKD, v_hKD = (x[:, rows].double().repeat_interleave(group, 0) for x in (memory.keys_gPD, memory.values_gPD))
        weights_hK = (torch.einsum("hd,hkd->hk", q_hD, k_hKD) * SCALE).softmax(-1)
        out.append(torch.einsum("hk,hkd->hd", weights_hK, v_hKD))
    return torch.stack(out)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even small work is cut in parts."""
    monkeypatch.setattr(attention_kernel, "_PART_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@either
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(3, 1, 16), (9, 3, 64), (4, 4, 8), (16, 2, 128), (11, 1, 80), (14, 2, 64), (5, 1, 64), (6, 1, 32)],
)
def test_it_is_softmax_attention(heads: int, kv_heads: int, head_dim: int, is_half: bool) -> None:
    memory = make_memory(kv_heads=kv_heads, head_dim=head_dim, is_half=is_half)
    q_NhD = make_queries(8, heads=heads, head_dim=head_dim)
    slots_N, visible_N = [0, 0, 0, 2, 1, 1, 0, 0], [1, 17, 64, 65, 130, 131, LENGTH, 5]
    for window, first in [(None, 0), (20, 0), (64, 0), (None, 1), (100, 3)]:
        visible_N[0] = first + 1
        out_NhD = memory.attend(q_NhD, slots_N, visible_N, window=window, first=first)
        reference_NhD = expected(memory, q_NhD, slots_N, visible_N, window, first)
        torch.testing.assert_close(out_NhD.double(), reference_NhD, rtol=2e-6, atol=2e-6)


@either
def test_large_scores_neither_overflow_nor_lose_the_rest(is_half: bool) -> None:
    memory = make_memory(spread=100.0, is_half=is_half)
    q_NhD = make_queries(4)
    slots_N, visible_N = [0, 1, 2, 2], [LENGTH, 100, 64, 1]
    out_NhD = memory.attend(q_NhD, slots_N, visible_N)
    reference_NhD = expected(memory, q_NhD, slots_N, visible_N, None, 0)
    torch.testing.assert_close(out_NhD.double(), reference_NhD, rtol=1e-4, atol=1e-4)


@either
def test_one_visible_position_gives_its_value(is_half: bool) -> None:
    memory = make_memory(is_half=is_half)
    out_1hD = memory.attend(make_queries(1), [1], [40], window=1)
    assert torch.equal(out_1hD, memory.values_gPD[:, memory.rows(1)[39]].expand(1, 3, -1))


Query = tuple[int, int]  # slot, visible


@either
@given(
    queries=st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(1, LENGTH)), min_size=1, max_size=40),
    window=st.one_of(st.none(), st.integers(1, LENGTH)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_bits_depend_on_nothing_but_what_a_query_sees(
    queries: list[Query], window: int | None, data: st.DataObject, is_half: bool
) -> None:
    memory = make_memory(is_half=is_half)
    q_NhD = make_queries(len(queries))
    slots_N, visible_N = (torch.tensor(x) for x in zip(*queries, strict=True))
    together = memory.attend(q_NhD, slots_N, visible_N, window=window)

    alone = [memory.attend(q_NhD[[n]], slots_N[[n]], visible_N[[n]], window=window) for n in range(len(queries))]
    assert torch.equal(together, torch.cat(alone))

    order = torch.tensor(data.draw(st.permutations(range(len(queries)))))
    permuted = memory.attend(q_NhD[order], slots_N[order], visible_N[order], window=window)
    assert torch.equal(together[order], permuted)

    by_slot = slots_N.argsort(stable=True)  # as many as can be are computed together
    assert torch.equal(
        together[by_slot], memory.attend(q_NhD[by_slot], slots_N[by_slot], visible_N[by_slot], window=window)
    )


@either
@given(moved=st.permutations(range(NUM_SLOTS * NUM_BLOCKS + 1)), visible=st.integers(1, LENGTH))
@settings(max_examples=30, deadline=None)
def test_bits_do_not_depend_on_where_blocks_lie(moved: list[int], visible: int, is_half: bool) -> None:
    memory = make_memory(is_half=is_half)
    blocks = torch.tensor(moved)
    rows = (blocks.argsort().unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    other = Memory(
        keys_gPD=memory.keys_gPD[:, rows],
        values_gPD=memory.values_gPD[:, rows],
        tables_SB=blocks[memory.tables_SB.long()].int(),
        is_half=is_half,
    )
    q_NhD = make_queries(NUM_SLOTS)
    slots_N, visible_N = list(range(NUM_SLOTS)), [visible] * NUM_SLOTS
    assert torch.equal(memory.attend(q_NhD, slots_N, visible_N), other.attend(q_NhD, slots_N, visible_N))


@either
@given(cuts=st.sets(st.integers(1, 149), max_size=6), window=st.sampled_from([None, 30]))
@settings(max_examples=30, deadline=None)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(cuts: set[int], window: int | None, is_half: bool) -> None:
    memory = make_memory(is_half=is_half)
    q_NhD = make_queries(150)
    whole = memory.attend(q_NhD, [1] * 150, list(range(1, 151)), window=window)
    bounds = [0, *sorted(cuts), 150]
    pieces = [
        memory.attend(q_NhD[begin:end], [1] * (end - begin), list(range(begin + 1, end + 1)), window=window)
        for begin, end in pairwise(bounds)
    ]
    assert torch.equal(whole, torch.cat(pieces))


@either
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("count", [1, 7, 120])
def test_bits_do_not_depend_on_threads(
    request: pytest.FixtureRequest, count: int, window: int | None, is_half: bool
) -> None:
    memory = make_memory(kv_heads=3, head_dim=64, is_half=is_half)
    q_NhD = make_queries(count, heads=9, head_dim=64)
    slots_N, visible_N = [n * NUM_SLOTS // count for n in range(count)], [1 + n % LENGTH for n in range(count)]
    one = memory.attend(q_NhD, slots_N, visible_N, window=window)
    request.getfixturevalue("two_threads")
    assert torch.equal(one, memory.attend(q_NhD, slots_N, visible_N, window=window))


def test_callers_in_several_threads_do_not_disturb_each_other(two_threads: None) -> None:
    memory = make_memory()
    batches = [make_queries(20, seed=seed) for seed in range(8)]
    slots_N, visible_N = [n // 7 for n in range(20)], [n * 9 + 1 for n in range(20)]
    alone = [memory.attend(q_NhD, slots_N, visible_N) for q_NhD in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda q_NhD: memory.attend(q_NhD, slots_N, visible_N), batches * 5))
    assert all(torch.equal(out, alone[index % 8]) for index, out in enumerate(together))


@either
def test_what_is_not_visible_may_be_anything(is_half: bool) -> None:
    memory = make_memory(is_half=is_half)
    q_NhD = make_queries(3)
    slots_N, visible_N = [0, 0, 1], [70, 90, 21]
    before = memory.attend(q_NhD, slots_N, visible_N, window=19)
    seen = torch.zeros(memory.keys_gPD.shape[1], dtype=torch.bool)
    seen[memory.rows(0)[51:90]] = True
    seen[memory.rows(1)[2:21]] = True
    for pool in (memory.keys_gPD, memory.values_gPD):
        pool[:, ~seen] = math.nan
    assert torch.equal(before, memory.attend(q_NhD, slots_N, visible_N, window=19))
    # What one query of a pass sees must not reach another either.
    for pool in (memory.keys_gPD, memory.values_gPD):
        pool[:, memory.rows(0)[70:90]] = math.nan
    after = memory.attend(q_NhD, slots_N, visible_N, window=19)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert after[1].isnan().all()


@needs_instructions
def test_both_layouts_give_the_same_bits() -> None:
    memory = make_memory(kv_heads=2, head_dim=40, is_half=True)
    q_NhD = make_queries(20, heads=6, head_dim=40)
    slots_N, visible_N = [n // 7 for n in range(20)], [n * 9 + 1 for n in range(20)]
    out_NhD = memory.attend(q_NhD, slots_N, visible_N, window=70)
    assert torch.equal(out_NhD, replace(memory, is_half=False).attend(q_NhD, slots_N, visible_N, window=70))


def test_queries_may_be_strided_and_none_at_all() -> None:
    memory = make_memory()
    wide_NhD = make_queries(5, heads=6)
    out_NhD = memory.attend(wide_NhD[:, 2:5], [0] * 5, [50] * 5)
    assert torch.equal(out_NhD, memory.attend(wide_NhD[:, 2:5].clone(), [0] * 5, [50] * 5))
    empty = torch.empty(0, dtype=torch.int64)
    assert memory.attend(wide_NhD[:0, 2:5], empty, empty).shape == (0, 3, 16)


@either
@pytest.mark.parametrize(
    ("slot", "visible", "first"), [(-1, 5, 0), (NUM_SLOTS, 5, 0), (0, 0, 0), (0, LENGTH + 1, 0), (0, 4, 4), (0, 4, -1)]
)
def test_what_does_not_exist_is_refused(slot: int, visible: int, first: int, is_half: bool) -> None:
    with pytest.raises(ValueError, match="visible_N, slots_N or tables_SB"):
        make_memory(is_half=is_half).attend(make_queries(2), [1, slot], [9, visible], first=first)


@either
@pytest.mark.parametrize("block", [-1, NUM_SLOTS * NUM_BLOCKS + 1])
def test_only_blocks_that_are_seen_must_exist(block: int, is_half: bool) -> None:
    memory = make_memory(is_half=is_half)
    good = memory.attend(make_queries(1), [1], [40])
    memory.tables_SB[1, 3] = block
    assert torch.equal(good, memory.attend(make_queries(1), [1], [40]))
    with pytest.raises(ValueError, match="tables_SB"):
        memory.attend(make_queries(1), [1], [49])


def test_other_types_layouts_and_sizes_are_refused() -> None:
    memory = make_memory()
    with pytest.raises(ValueError, match="contiguous CPU tensors of types"):
        memory.attend(make_queries(1), torch.tensor([0], dtype=torch.int32), [1])
    with pytest.raises(ValueError, match="contiguous CPU tensors of types"):
        Memory(
            keys_gPD=memory.keys_gPD.transpose(1, 2).contiguous().transpose(1, 2),
            values_gPD=memory.values_gPD,
            tables_SB=memory.tables_SB,
        ).attend(make_queries(1), [0], [1])
    with pytest.raises(ValueError, match="contiguous CPU tensors of types"):
        Memory(
            keys_gPD=as_columns(memory.keys_gPD).half(), values_gPD=memory.values_gPD, tables_SB=memory.tables_SB
        ).attend(make_queries(1), [0], [1])
    with pytest.raises(ValueError, match="do not go together"):
        Memory(keys_gPD=memory.keys_gPD.half(), values_gPD=memory.values_gPD.half(), tables_SB=memory.tables_SB).attend(
            make_queries(1), [0], [1]
        )
    with pytest.raises(ValueError, match="multiple of 8"):
        make_memory(head_dim=12).attend(make_queries(1, head_dim=12), [0], [1])


@either
@pytest.mark.parametrize(
    ("heads", "head_dim", "queries"), [(3, 8, 1), (4, 16, 1), (3, 16, 2)], ids=["head size", "heads", "queries"]
)
def test_shapes_that_do_not_go_together_are_refused(heads: int, head_dim: int, queries: int, is_half: bool) -> None:
    memory = make_memory(kv_heads=3, is_half=is_half)
    with pytest.raises(ValueError, match="do not go together"):
        memory.attend(make_queries(queries, heads=heads, head_dim=head_dim), [0], [1])


def test_where_it_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_available(torch.empty(2, 16, 8))
    assert not is_available(torch.empty(2, 16, 8, dtype=torch.bfloat16))
    assert not is_available(torch.empty(2, 16, 12))
    assert not is_available(torch.empty(2, 16, 8, device="meta"))
    monkeypatch.setattr(config, "DISABLE_JIT", 1)  # as NUMBA_DISABLE_JIT asks for it
    assert not is_available(torch.empty(2, 16, 8))

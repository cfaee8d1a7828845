"""Attention over slots against its definition, in the compiled way (float32) and the general one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dspark.models.attention import AttentionPlan, attend
from dspark.models.block_tables import BlockTables
from dspark.models.kv_cache import KVCache
from dspark.types import Segment

CPU = torch.device("cpu")
WAYS = {"compiled": (torch.float32, 8), "general": (torch.float64, 8), "odd-heads": (torch.float32, 5)}
HEADS, KV_HEADS = 6, 2
each_way = pytest.mark.parametrize(("dtype", "head_dim"), WAYS.values(), ids=WAYS)


def scattered_tables() -> BlockTables:
    tables = BlockTables(num_slots=4, max_length=100, num_blocks=17, device=CPU)
    for slot, blocks in enumerate(([3, 11, 0, 16], [5], [], [9, 2, 8])):
        tables.assign(slot, blocks)
    return tables


def neighbouring_tables() -> BlockTables:
    return BlockTables.contiguous(4, 60, CPU)


def split_tables() -> BlockTables:
    """Runs of blocks at unequal distances, the last of them shorter than others are long."""
    tables = BlockTables(num_slots=4, max_length=100, num_blocks=17, device=CPU)
    for slot, blocks in enumerate(([4, 5, 6, 7], [1], [], [14, 15, 16])):
        tables.assign(slot, blocks)
    return tables


def make_cache(tables: BlockTables, dtype: torch.dtype, head_dim: int) -> KVCache:
    return KVCache(
        num_layers=1, num_slots=4, num_kv_heads=KV_HEADS, max_length=50, head_dim=head_dim, dtype=dtype, device=CPU,
        tables=tables,
    )  # fmt: skip


BATCHES = {
    "one": [Segment(0, 17, 1)],
    "chunk": [Segment(3, 5, 30)],
    "ragged": [Segment(3, 20, 9), Segment(1, 0, 3), Segment(0, 45, 1)],
    "equal": [Segment(0, 5, 4), Segment(1, 12, 4), Segment(3, 8, 4)],
    "same-end": [Segment(0, 11, 1), Segment(1, 11, 1)],
}


@each_way
@pytest.mark.parametrize("make_tables", [scattered_tables, neighbouring_tables, split_tables])
@pytest.mark.parametrize(
    ("causal", "window", "first"), [(True, None, 0), (True, 7, 0), (False, None, 0), (True, None, 1)]
)
@pytest.mark.parametrize("segments", BATCHES.values(), ids=BATCHES)
def test_attention_is_softmax_over_what_a_token_sees(
    segments: list[Segment],
    causal: bool,
    window: int | None,
    first: int,
    make_tables: Callable[[], BlockTables],
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    tables = make_tables()
    cache = make_cache(tables, dtype, head_dim)
    generator = torch.Generator().manual_seed(0)
    count = sum(segment.length for segment in segments)
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
    q_NhD = torch.randn(count, HEADS, head_dim, generator=generator).to(dtype)
    new_kv = torch.randn(2, count, KV_HEADS, head_dim, generator=generator).to(dtype)
    if first == 1:  # no token is at position 0, and no number that is there may count
        segments = [Segment(s.slot, max(s.start, 1), s.length) for s in segments]
        rows = tables.slot_rows([0, 1, 3], 1).flatten()
        cache.keys[:, :, rows] = cache.values[:, :, rows] = 1e4
    before = torch.cat([cache.keys, cache.values])
    plan = AttentionPlan(segments, cache, window=window, causal=causal, first=first)
    whole, slid = (
        attend(q_NhD, *new_kv, cache.keys[0], cache.values[0], plan, scale=0.3, sliding=sliding).double()
        for sliding in (False, True)
    )
    memory = torch.cat([cache.keys, cache.values])

    written: set[int] = set()
    token = 0
    for segment in segments:
        rows_P = tables.slot_rows([segment.slot], segment.end)[0]
        written.update(rows_P[segment.start :].tolist())
        keys_gPD, values_gPD = memory[:, :, rows_P].double()
        new_rows = new_kv[:, token : token + segment.length].transpose(1, 2).double()
        assert torch.equal(torch.stack([keys_gPD, values_gPD])[:, :, segment.start :], new_rows)
        for position in range(segment.start, segment.end):
            visible = position + 1 if causal else segment.end
            for out, begin in ((whole, first), (slid, first if window is None else max(first, visible - window))):
                for head in range(HEADS):
                    seen_PD = keys_gPD[head // 3, begin:visible]
                    weights_P = (seen_PD @ q_NhD[token, head].double() * 0.3).softmax(0)
                    expected_D = weights_P @ values_gPD[head // 3, begin:visible]
                    torch.testing.assert_close(out[token, head], expected_D, atol=2e-6, rtol=2e-5)
            token += 1
    untouched = [row for row in range(tables.num_rows) if row not in written]
    assert torch.equal(memory[:, :, untouched], before[:, :, untouched])


@each_way
def test_values_of_any_size_are_mixed_without_overflow(dtype: torch.dtype, head_dim: int) -> None:
    cache = make_cache(scattered_tables(), dtype, head_dim)
    keys = torch.linspace(-300, 300, 20, dtype=dtype).view(20, 1, 1).expand(20, KV_HEADS, head_dim)
    values = torch.arange(20, dtype=dtype).view(20, 1, 1).expand(20, KV_HEADS, head_dim)
    plan = AttentionPlan([Segment(0, 0, 20)], cache)
    q_NhD = torch.ones(20, HEADS, head_dim, dtype=dtype)
    out_NhD = attend(q_NhD, keys, values, cache.keys[0], cache.values[0], plan, scale=1.0)
    assert torch.equal(out_NhD[:, 0, 0], torch.arange(20, dtype=dtype))
    assert math.isfinite(float(out_NhD.sum()))

"""DSpark drafters that compute in int8: near to what they compute in float32, and each row from itself alone."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.drafters import DrafterCache, DSparkDrafter, TrainableDrafter, draft_kernel
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.drafters.draft_kernel import _MOST_CONTEXT
from dspark.drafters.protocol import DraftSampler, PlainSampler
from dspark.models.block_tables import BLOCK_SIZE, BlockTables
from dspark.models.instructions import has_dot_products
from dspark.models.threads import run_together
from tests.drafters.conftest import Context, FakeTarget
from tests.drafters.test_kinds import Forced, extend, fill
from tests.drafters.test_shared_blocks import change_hands, make_tables, new_cache

DrafterOf = Callable[..., TrainableDrafter]
ContextOf = Callable[[TrainableDrafter, int], Context]
HEADS = ("none", "vanilla", "gated", "rnn")

pytestmark = pytest.mark.skipif(not has_dot_products(), reason="this processor has no instructions for it")


def wide(drafter_of: DrafterOf, variant: str, **changes: object) -> DSparkDrafter:
    drafter = drafter_of(variant, head_dim=8, **changes)
    assert isinstance(drafter, DSparkDrafter)
    return drafter


def forced(drafter: TrainableDrafter, contexts: dict[int, Context], anchors: list[int]):
    """Logits [R, G, D] and confidence logits of given tokens, over contexts in the slots that are named."""
    cache = fill(drafter, contexts, 4, 50)
    columns = torch.tensor([[3, 1, 4, 1]])[:, : drafter.block_size].expand(len(contexts), -1)
    sampler = Forced(columns, drafter.draft_token_ids_D)
    block = drafter.propose(cache, list(contexts), torch.tensor(anchors), sampler)
    return sampler.logits_RGD, block.confidence_logits_RG


@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("reduced", [False, True])
def test_int8_is_near_to_float(variant: str, reduced: bool, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    """A few parts in a hundred are what numbers of 8 bits leave of random weights."""
    drafter = wide(drafter_of, variant, reduced=reduced)
    contexts = {2: context_of(drafter, 30), 0: context_of(drafter, 3)}
    exact, sure = forced(drafter, contexts, [7, 1])
    assert drafter.compute_dtype == "float32"
    drafter.compute_in_int8()
    assert drafter.compute_dtype == "int8"
    near, near_sure = forced(drafter, contexts, [7, 1])
    assert near.dtype == torch.float32
    error = (near - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm()
    assert 0.0 < error < 0.06
    if sure is not None:
        torch.testing.assert_close(near_sure, sure, atol=0.15, rtol=0.0)


@pytest.mark.parametrize("variant", HEADS)
def test_a_row_has_the_same_bits_alone_and_in_company(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = wide(drafter_of, variant)
    drafter.compute_in_int8()
    contexts = {3: context_of(drafter, 17), 1: context_of(drafter, 40), 0: context_of(drafter, 5)}
    together, _ = forced(drafter, contexts, [5, 6, 7])
    for row, (slot, context) in enumerate(contexts.items()):
        alone, _ = forced(drafter, {slot: context}, [5 + row])
        if variant in ("none", "vanilla"):  # other heads have products in the parameters' type
            assert torch.equal(together[row], alone[0])
        else:
            torch.testing.assert_close(together[row], alone[0])


def test_it_goes_by_the_weights_as_they_were(drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = wide(drafter_of, "none")
    drafter.compute_in_int8()
    contexts = {0: context_of(drafter, 9)}
    expected, _ = forced(drafter, contexts, [7])
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if not name.startswith("embed_tokens"):
                parameter.mul_(2.0)
    assert torch.equal(forced(drafter, contexts, [7])[0], expected)


def test_a_loaded_drafter_computes_as_its_target_does_unless_told(
    tmp_path: Path, drafter_of: DrafterOf, target: FakeTarget
) -> None:
    drafter = wide(drafter_of, "vanilla")
    save_drafter(drafter, tmp_path, include_embeddings=True)
    assert load_drafter(tmp_path, target).compute_dtype == "float32"
    target.compute_dtype = "int8"
    loaded = load_drafter(tmp_path, target)
    assert loaded.compute_dtype == "int8"
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert load_drafter(tmp_path, target, dtype=torch.float32).compute_dtype == "float32"


def test_a_drafter_that_cannot_is_loaded_in_its_own_type_and_refuses(
    tmp_path: Path, drafter_of: DrafterOf, target: FakeTarget
) -> None:
    drafter = drafter_of("vanilla", head_dim=6)
    assert isinstance(drafter, DSparkDrafter)
    with pytest.raises(ValueError, match=r"head_dim divisible by 8 \(device cpu, head_dim 6\)"):
        drafter.compute_in_int8()
    target.compute_dtype = "int8"
    for variant, changes in (("vanilla", {"head_dim": 6}), ("eagle3", {})):
        save_drafter(drafter_of(variant, **changes), tmp_path / variant, include_embeddings=True)
        assert load_drafter(tmp_path / variant, target).compute_dtype == "float32"


def greedy(num_rows: int) -> PlainSampler:
    return PlainSampler(temperatures_R=(0.0,) * num_rows, uniforms_RG=np.empty((num_rows, 0)))


def by_turns(sampler: PlainSampler) -> DraftSampler:
    """The same draws, but nothing that a drafter could know a faster way for."""
    return sampler.__call__


@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 4])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0, 0.0), (1.0, 0.6, 2.0), (0.0, 3.0, 0.0)])
def test_blocks_of_one_call_are_those_drawn_by_turns(
    variant: str,
    reduced: bool,
    num_tokens: int,
    temperatures: tuple[float, ...],
    drafter_of: DrafterOf,
    context_of: ContextOf,
) -> None:
    drafter = wide(drafter_of, variant, reduced=reduced)
    drafter.compute_in_int8()
    cache = fill(drafter, {2: context_of(drafter, 30), 0: context_of(drafter, 3), 1: context_of(drafter, 9)}, 4, 50)
    uniforms_RG = np.random.default_rng(0).random((3, 4))
    sampler = PlainSampler(temperatures_R=temperatures, uniforms_RG=uniforms_RG)
    slots, anchors = [2, 0, 1], torch.tensor([7, 1, 52])
    block = drafter.propose(cache, slots, anchors, sampler, num_tokens)
    expected = drafter.propose(cache, slots, anchors, by_turns(sampler), num_tokens)
    assert torch.equal(block.tokens_RG, expected.tokens_RG)
    assert num_tokens < 4 or len(block.tokens_RG.unique()) > 2  # not the same few tokens everywhere
    assert (block.probs_RGD is None) == sampler.is_greedy
    if block.probs_RGD is not None:
        torch.testing.assert_close(block.probs_RGD, expected.probs_RGD)
        sums_R = torch.tensor([float(temperature > 0) for temperature in temperatures])
        torch.testing.assert_close(block.probs_RGD.sum(-1), sums_R[:, None].expand(-1, num_tokens))
    if block.confidence_logits_RG is None:
        assert expected.confidence_logits_RG is None
    else:
        assert torch.equal(block.confidence_logits_RG, expected.confidence_logits_RG)


def test_a_drafter_in_bfloat16_is_the_same_in_one_call_and_by_turns(
    drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = wide(drafter_of, "vanilla", reduced=True).to(torch.bfloat16)
    drafter.compute_in_int8()
    cache = fill(drafter, {0: context_of(drafter, 20), 1: context_of(drafter, 9)})
    block = drafter.propose(cache, [0, 1], torch.tensor([7, 3]), greedy(2))
    expected = drafter.propose(cache, [0, 1], torch.tensor([7, 3]), by_turns(greedy(2)))
    assert torch.equal(block.tokens_RG, expected.tokens_RG)
    assert block.confidence_logits_RG is not None
    assert expected.confidence_logits_RG is not None
    assert torch.equal(block.confidence_logits_RG, expected.confidence_logits_RG)


def test_samplers_of_other_rows_and_caches_of_other_drafters_are_refused(
    drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    cache = fill(drafter, {0: context_of(drafter, 20)})
    anchor = torch.tensor([7])
    with pytest.raises(ValueError, match="2 temperatures: give one for each of 1 rows"):
        drafter.propose(cache, [0], anchor, greedy(2))
    for uniforms_RG in (np.zeros((1, 2)), np.zeros((2, 4)), np.ones((1, 4)), np.full((1, 4), np.nan)):
        with pytest.raises(ValueError, match="uniforms have shape"):
            drafter.propose(cache, [0], anchor, PlainSampler(temperatures_R=(1.0,), uniforms_RG=uniforms_RG))
    smaller = wide(drafter_of, "vanilla", num_hidden_layers=1)
    other_taps = wide(drafter_of, "vanilla", target_layer_ids=(1,))
    assert len(other_taps.tap_layers) != len(drafter.tap_layers)
    for other in (smaller, other_taps):
        other.compute_in_int8()
        foreign = fill(other, {0: context_of(other, 20)}, 1, 400)
        with pytest.raises(ValueError, match="take one from its new_cache"):
            extend(drafter, foreign, {0: (20, context_of(drafter, 20))})
        assert foreign.lengths == [20]
        with pytest.raises(ValueError, match="take one from its new_cache"):
            drafter.propose(foreign, [0], anchor, greedy(1))


def test_weights_that_are_no_numbers_are_an_error(drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = wide(drafter_of, "vanilla")
    with torch.no_grad():
        drafter.norm.weight.fill_(torch.nan)
    drafter.compute_in_int8()
    cache = fill(drafter, {0: context_of(drafter, 20)})
    sampler = PlainSampler(temperatures_R=(1.0,), uniforms_RG=np.zeros((1, 4)))
    with pytest.raises(ValueError, match="no finite maximum"):
        drafter.propose(cache, [0], torch.tensor([7]), sampler)


@pytest.mark.parametrize("wrong", [-1, 53])
def test_an_anchor_outside_the_vocabulary_is_refused(wrong: int, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    cache = fill(drafter, {0: context_of(drafter, 20), 1: context_of(drafter, 5)})
    with pytest.raises(ValueError, match=r"anchors_R has an id outside the vocabulary 0..52"):
        drafter.propose(cache, [0, 1], torch.tensor([7, wrong]), greedy(2))


def test_greedy_blocks_without_a_confidence_head_or_without_its_embedding(
    drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    for changes in ({"confidence": False}, {"confidence_head_with_markov": False}):
        drafter = wide(drafter_of, "vanilla", **changes)
        drafter.compute_in_int8()
        cache = fill(drafter, {0: context_of(drafter, 20)})
        block = drafter.propose(cache, [0], torch.tensor([7]), greedy(1))
        expected = drafter.propose(cache, [0], torch.tensor([7]), by_turns(greedy(1)))
        assert torch.equal(block.tokens_RG, expected.tokens_RG)
        assert (block.confidence_logits_RG is None) == ("confidence" in changes)
        if block.confidence_logits_RG is not None:
            torch.testing.assert_close(block.confidence_logits_RG, expected.confidence_logits_RG)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_greedy_block_has_the_same_bits_alone_and_in_company(
    threads: int, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    contexts = {slot: context_of(drafter, 5 + 3 * slot) for slot in range(11)}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache = fill(drafter, contexts, 11, 50)
        together = drafter.propose(cache, list(contexts), torch.arange(11), greedy(11))
        torch.set_num_threads(1)
        for slot, context in contexts.items():
            alone = drafter.propose(fill(drafter, {0: context}), [0], torch.tensor([slot]), greedy(1))
            assert torch.equal(alone.tokens_RG[0], together.tokens_RG[slot])
            assert alone.confidence_logits_RG is not None
            assert together.confidence_logits_RG is not None
            assert torch.equal(alone.confidence_logits_RG[0], together.confidence_logits_RG[slot])
    finally:
        torch.set_num_threads(before)


def waiting(cache: DrafterCache, length: int) -> int:
    """Of the first rows of a cache with one slot, those that wait."""
    return int(cache.is_waiting[:length].sum())


def test_context_that_waits_in_parts_is_as_if_it_came_at_once(drafter_of: DrafterOf, context_of: ContextOf) -> None:
    """Also if a part was rolled back and other tokens took its places; and if it is more than one call's."""
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    size, anchor = _MOST_CONTEXT + 40, torch.tensor([9])
    context, other = context_of(drafter, size), context_of(drafter, 20)
    expected = drafter.new_cache(1, size + 50)
    for start in range(0, size, 50):
        extend(drafter, expected, {0: (start, context.cut(start, start + 50))})
        drafter.propose(expected, [0], anchor, greedy(1))
    cache = drafter.new_cache(1, size + 50)
    extend(drafter, cache, {0: (0, context.cut(0, 30))})
    extend(drafter, cache, {0: (30, other)})
    cache.truncate(0, 30)
    extend(drafter, cache, {0: (30, context.cut(30))})
    drafter.catch_up(cache, [])
    assert waiting(cache, size) == size
    drafter.catch_up(cache, [0])
    assert waiting(cache, size) == 0
    keys, expected_keys = (each.keys.transpose(-1, -2).flatten(2, 3) for each in (cache, expected))  # columns there
    assert torch.equal(keys[:, :, :size], expected_keys[:, :, :size])
    assert torch.equal(cache.values[:, :, :size], expected.values[:, :, :size])
    whole = drafter.propose(cache, [0], anchor, greedy(1))
    assert torch.equal(whole.tokens_RG, drafter.propose(expected, [0], anchor, greedy(1)).tokens_RG)
    single = drafter.new_cache(1, size + 50)
    extend(drafter, single, {0: (0, context)})
    assert torch.equal(drafter.propose(single, [0], anchor, greedy(1)).tokens_RG, whole.tokens_RG)  # no catching up
    assert waiting(single, size) == 0


def test_what_a_round_brings_is_left_to_the_draft(drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    context = context_of(drafter, 20)
    cache = fill(drafter, {0: context}, 1, 50)
    drafter.propose(cache, [0], torch.tensor([9]), greedy(1))
    extend(drafter, cache, {0: (20, context.cut(0, 1 + drafter.block_size))})
    drafter.catch_up(cache, [0])
    assert waiting(cache, 50) == 1 + drafter.block_size
    extend(drafter, cache, {0: (21 + drafter.block_size, context.cut(0, 1))})
    drafter.catch_up(cache, [0])
    assert waiting(cache, 50) == 0


def test_int8_context_that_waits_belongs_to_the_place_whoever_has_it(
    drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    """Nothing drafts while tokens are rejected, blocks change hands, and two slots adopt what waits."""
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    first, second = context_of(drafter, 20), context_of(drafter, 37)
    tables = make_tables({0: [4, 2]})
    cache = new_cache(drafter, tables)
    extend(drafter, cache, {0: (0, first)})
    drafter.propose(cache, [0], torch.tensor([9]), greedy(1))
    change_hands(drafter, cache, first, second)
    for slot, own in ((2, 6), (3, 8)):
        tables.assign(slot, [2, 4, own])
        cache.adopt(slot, 32)
        extend(drafter, cache, {slot: (32, second.cut(32))})
    assert int(cache.is_waiting.sum()) == 33 + 2 * 5  # what two slots share waits once
    anchors = torch.tensor([9, 9])
    together = drafter.propose(cache, [2, 3], anchors, greedy(2))
    assert int(cache.is_waiting.sum()) == 1  # the first one's own
    fresh = fill(drafter, {0: second})
    alone = drafter.propose(fresh, [0], anchors[:1], greedy(1))
    for row in range(2):
        assert torch.equal(together.tokens_RG[row], alone.tokens_RG[0])
        assert together.confidence_logits_RG is not None
        assert alone.confidence_logits_RG is not None
        assert torch.equal(together.confidence_logits_RG[row], alone.confidence_logits_RG[0])


def test_context_that_others_replace_without_a_roll_back_is_computed_anew(
    drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    context, other = context_of(drafter, 20), context_of(drafter, 15)
    cache = fill(drafter, {0: context})
    drafter.propose(cache, [0], torch.tensor([9]), greedy(1))
    extend(drafter, cache, {0: (10, other)})
    fresh = fill(drafter, {0: context.cut(0, 10) + other})
    assert same_blocks(drafter, cache, 0, fresh, 0)


def same_blocks(drafter: DSparkDrafter, cache: DrafterCache, slot: int, other: DrafterCache, other_slot: int) -> bool:
    """Whether the same is drafted from both, bit for bit."""
    one, two = (
        drafter.propose(memory, [place], torch.tensor([9]), greedy(1))
        for memory, place in ((cache, slot), (other, other_slot))
    )
    assert one.confidence_logits_RG is not None
    assert two.confidence_logits_RG is not None
    return torch.equal(one.tokens_RG, two.tokens_RG) and torch.equal(one.confidence_logits_RG, two.confidence_logits_RG)


def test_bytes_of_a_block_count_what_waits(drafter_of: DrafterOf) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    cache = drafter.new_cache(2, 40)
    memory = (cache.keys, cache.values, cache.features_of_rows, cache.is_waiting)
    assert cache.nbytes_per_block * cache.tables.num_blocks == sum(tensor.nbytes for tensor in memory)
    assert cache.features_of_rows.nbytes > len(drafter.tap_layers) * drafter.config.hidden_size * len(cache.is_waiting)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_slots_a_draft_sees_their_context(
    seed: int, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    """Slots grow, roll back, are drafted for, share prefixes, end and begin anew in blocks that others have left."""
    draw = random.Random(seed)
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    inputs, most = 1 + drafter.block_size, 44
    tables = BlockTables(num_slots=4, max_length=64, num_blocks=16, device=torch.device("cpu"))
    cache = drafter.new_cache(4, 64 - inputs, tables)
    blocks: dict[int, list[int]] = {}
    contexts: dict[int, Context] = {}
    shared: dict[int, int] = {}  # tokens of a slot that others may have, too: nobody writes there
    compared = 0

    def assign(slot: int) -> None:
        missing = -(-(len(contexts[slot].tokens_N) + inputs + 6) // BLOCK_SIZE) - len(blocks[slot])
        used = {block for owned in blocks.values() for block in owned}
        blocks[slot] += draw.sample([block for block in range(16) if block not in used], max(missing, 0))
        tables.assign(slot, blocks[slot])

    for _ in range(120):
        slot = draw.randrange(4)
        if slot not in contexts:
            givers = [other for other in contexts if len(contexts[other].tokens_N) > BLOCK_SIZE]
            giver = draw.choice(givers) if givers and draw.random() < 0.7 else None
            count = 0 if giver is None else len(contexts[giver].tokens_N) // BLOCK_SIZE * BLOCK_SIZE
            contexts[slot] = context_of(drafter, 0) if giver is None else contexts[giver].cut(0, count)
            blocks[slot] = [] if giver is None else blocks[giver][: count // BLOCK_SIZE]
            shared[slot] = count
            if giver is not None:
                shared[giver] = max(shared[giver], count)
            assign(slot)
            if giver is not None:
                cache.adopt(slot, count)
            extend(drafter, cache, {slot: (count, more := context_of(drafter, draw.randint(1, 6)))})
            contexts[slot] += more
            continue
        length = len(contexts[slot].tokens_N)
        event = draw.choice(["extend", "extend", "extend", "roll back", "draft", "catch up", "leave"])
        if event == "leave" or length > most:
            cache.truncate(slot, 0)
            tables.assign(slot, [])
            del contexts[slot], blocks[slot], shared[slot]
        elif event == "extend":
            assign(slot)
            extend(drafter, cache, {slot: (length, more := context_of(drafter, draw.randint(1, 6)))})
            contexts[slot] += more
        elif event == "roll back":
            length = draw.randint(max(shared[slot], 1), length)
            cache.truncate(slot, length)
            contexts[slot] = contexts[slot].cut(0, length)
        elif event == "catch up":
            drafter.catch_up(cache, list(contexts))
        else:
            assign(slot)
            assert same_blocks(drafter, cache, slot, fill(drafter, {0: contexts[slot]}, 1, 60), 0)
            compared += 1
    assert compared > 5


def test_int8_context_still_waits_after_an_error(
    drafter_of: DrafterOf, context_of: ContextOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    context = context_of(drafter, 12)
    cache = fill(drafter, {0: context})
    expected = drafter.propose(fill(drafter, {0: context}), [0], torch.tensor([9]), greedy(1))

    def fail(*arguments: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(draft_kernel, "run_together", fail)
        with pytest.raises(MemoryError):
            drafter.propose(cache, [0], torch.tensor([9]), greedy(1))
    assert waiting(cache, 12) == 12
    assert torch.equal(drafter.propose(cache, [0], torch.tensor([9]), greedy(1)).tokens_RG, expected.tokens_RG)


def test_what_was_caught_up_with_before_an_error_is_kept_and_the_rest_still_waits(
    drafter_of: DrafterOf, context_of: ContextOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = wide(drafter_of, "vanilla")
    drafter.compute_in_int8()
    size = 2 * _MOST_CONTEXT + 30
    context, calls = context_of(drafter, size), 0
    cache, fresh = (fill(drafter, {0: context}, 1, size + 10) for _ in range(2))

    def fail_later(*arguments: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return run_together(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(draft_kernel, "run_together", fail_later)
        with pytest.raises(MemoryError):
            drafter.catch_up(cache, [0])
    assert waiting(cache, size) == size - _MOST_CONTEXT
    assert same_blocks(drafter, cache, 0, fresh, 0)
    assert waiting(cache, size) == 0


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_copy_drafts_from_its_own_weights(is_pickled: bool, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = wide(drafter_of, "vanilla", reduced=True)
    drafter.compute_in_int8()
    contexts = {1: context_of(drafter, 20)}
    before, _ = forced(drafter, contexts, [7])
    copied = pickle.loads(pickle.dumps(drafter)) if is_pickled else copy.deepcopy(drafter)
    for tensor in (*drafter.parameters(), *drafter.buffers()):
        tensor.data.zero_()
    computation = drafter._computation
    computation._kernel._weights.lm_head.packed.zero_()
    del drafter, computation
    gc.collect()
    after, _ = forced(copied, contexts, [7])
    torch.testing.assert_close(after, before, atol=0, rtol=0)

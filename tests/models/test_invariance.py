"""In int8 on a CPU a token's bits depend on the tokens before it alone, on nothing that is computed beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from dspark.models.block_tables import BlockTables
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache
from dspark.types import Segment
from tests.models.test_parity import CONFIGS, ours, random_model

FAMILIES = ("llama", "qwen2-sliding", "gemma3-softcap-scaled", "qwen3-tied-biased")
TAPS = (0, 2)


def int8_model(name: str) -> Decoder:
    config = copy.deepcopy(CONFIGS[name])
    config.max_position_embeddings = 512
    return ours(random_model(config), "int8")


def random_text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))


def run(model: Decoder, cache: KVCache, pieces: Sequence[tuple[int, int, torch.Tensor]]) -> list[torch.Tensor]:
    """One pass over ``(slot, start, tokens)`` pieces; for each its hidden states, taps and logits side by side."""
    segments = [Segment(slot, start, len(tokens)) for slot, start, tokens in pieces]
    output = model.forward(torch.cat([tokens for *_, tokens in pieces]), segments, cache, TAPS)
    assert output.taps_NT is not None
    states = torch.cat([output.hidden_NH, output.taps_NT, model.logits(output.hidden_NH)], dim=1)
    return list(states.split([segment.length for segment in segments]))


def alone(model: Decoder, text: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """The states of a text that is computed by itself, in the pieces between ``cuts``."""
    cache = model.new_cache(1, len(text))
    bounds = [0, *cuts, len(text)]
    return torch.cat([run(model, cache, [(0, a, text[a:b])])[0] for a, b in pairwise(bounds)])


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_prompt_has_the_same_bits_in_any_pieces(name: str) -> None:
    model = int8_model(name)
    text = random_text(301, 0)
    whole = alone(model, text, ())
    for cuts in ([*range(1, 301)], [256], [16, 64, 128, 129, 290], [5, 38, 39, 40, 111, 300]):
        assert torch.equal(alone(model, text, cuts), whole)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_token_has_the_same_bits_in_any_batch_and_in_any_blocks(name: str) -> None:
    """Ragged passes over four slots: prompts, single tokens, and blocks of drafts that are partly rolled back."""
    model = int8_model(name)
    texts = [random_text(length, seed) for seed, length in enumerate((150, 40, 97, 70))]
    expected = [alone(model, text, ()) for text in texts]
    tables = BlockTables(num_slots=6, max_length=160, num_blocks=40, device=torch.device("cpu"))
    free = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    cache = model.new_cache(6, 150, tables)
    slots = (4, 0, 5, 2)
    owned: dict[int, list[int]] = {slot: [] for slot in slots}
    done = [0] * 4
    generator = torch.Generator().manual_seed(2)
    passes = 0
    while any(count < len(text) for count, text in zip(done, texts, strict=True)):
        passes += 1
        pieces, rows = [], []
        for row, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            length = (1, 6, 33, 0)[int(torch.randint(4, (1,), generator=generator))]
            piece = text[done[row] : done[row] + length]
            if len(piece) == 0:
                continue
            while tables.capacity(slot) < done[row] + len(piece):
                owned[slot].append(free.pop())
                tables.assign(slot, owned[slot])
            pieces.append((slot, done[row], piece))
            rows.append(row)
        if not pieces:
            continue
        for row, (slot, start, piece), states in zip(rows, pieces, run(model, cache, pieces), strict=True):
            assert torch.equal(states, expected[row][start : start + len(piece)])
            # As if the last drafts were refused: what was written for them must leave no trace.
            kept = len(piece) - (len(piece) == 6) * 2
            done[row] = start + kept
            cache.truncate(slot, done[row])
    assert passes > 10


@torch.no_grad()
def test_a_prefix_from_another_slot_has_the_same_bits() -> None:
    model = int8_model("qwen2-sliding")
    text, other = random_text(80, 0), random_text(80, 1)
    other[:48] = text[:48]
    expected = alone(model, other, ())
    tables = BlockTables(num_slots=2, max_length=80, num_blocks=9, device=torch.device("cpu"))
    assert model.shares_blocks
    cache = model.new_cache(2, 80, tables)
    tables.assign(1, [8, 3, 5, 0, 1])
    run(model, cache, [(1, 0, text)])
    tables.assign(0, [8, 3, 5, 2, 7])
    cache.adopt(0, 48)
    assert torch.equal(run(model, cache, [(0, 48, other[48:])])[0], expected[48:])


@pytest.mark.parametrize("prompt_length", [130, 200])
@torch.no_grad()
def test_a_token_has_the_same_bits_whatever_the_cache_could_hold(prompt_length: int) -> None:
    """Another ``max_tokens`` means another cache: what both answers have must not depend on it."""
    model = int8_model("llama-wide-heads")
    text = random_text(prompt_length + 1, 0)
    outputs = []
    for max_length in (len(text), len(text) + 13, len(text) + 100, 300):
        cache = model.new_cache(1, max_length)
        model.forward(text[:-1], [Segment(0, 0, prompt_length)], cache)
        outputs.append(model.forward(text[-1:], [Segment(0, prompt_length, 1)], cache).hidden_NH)
    assert all(torch.equal(output, outputs[0]) for output in outputs)

"""Numbers of the published reference implementation, on tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.drafters import DrafterCache, DSparkDrafter, greedy_sampler, load_drafter
from dspark.types import Segment
from tests.drafters.packed import train

GOLDEN = Path(__file__).parents[1] / "golden"
DRAFTERS = ("dspark-vanilla", "dspark-gated", "dspark-rnn", "dflash-anchor-first")
TRAINED = DRAFTERS[:3]
Taps = Callable[[Tensor, tuple[int, ...]], Tensor]
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(scope="module", params=DRAFTERS)
def case(request: pytest.FixtureRequest) -> tuple[DSparkDrafter, dict[str, Tensor]]:
    directory = GOLDEN / request.param
    return load_drafter(directory), load_file(directory / "expected.safetensors")


@pytest.fixture(scope="module")
def target_taps() -> Taps:
    """Features of the tiny target at layers 1, 2, 4, computed by transformers."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(GOLDEN / "qwen3-tiny-target", dtype=torch.float32).eval()

    def taps(token_ids: Tensor, layers: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            states = model(token_ids[None], output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1][0] for layer in layers], dim=-1)

    return taps


class _Recorder:
    """Greedy sampler that keeps the logits it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, position: int, logits_RD: Tensor, tokens_Rk: Tensor) -> tuple[Tensor, Tensor]:
        assert tokens_Rk.shape[1] == position == len(self.logits)
        self.logits.append(logits_RD.clone())
        return greedy_sampler(position, logits_RD, tokens_Rk)


def _check_round(
    drafter: DSparkDrafter, cache: DrafterCache, anchor: Tensor, expected: dict[str, Tensor], name: str
) -> None:
    recorder = _Recorder()
    block = drafter.propose(cache, [0], anchor.view(1), recorder)
    assert torch.equal(block.tokens_RG, expected[f"{name}_tokens"])
    torch.testing.assert_close(torch.stack(recorder.logits, 1), expected[f"{name}_logits"], **TOLERANCE)
    with torch.no_grad():
        hidden, base = drafter._computation.blocks(cache, [0], anchor.view(1), drafter.block_size)
    torch.testing.assert_close(hidden, expected[f"{name}_hidden"], **TOLERANCE)
    if f"{name}_base_logits" in expected:
        torch.testing.assert_close(base, expected[f"{name}_base_logits"], **TOLERANCE)
    confidence = expected.get(f"{name}_confidence_logits")
    if confidence is None:
        assert block.confidence_logits_RG is None
    else:
        torch.testing.assert_close(block.confidence_logits_RG, confidence, **TOLERANCE)


def test_first_round(case: tuple[DSparkDrafter, dict[str, Tensor]]) -> None:
    drafter, expected = case
    cache = drafter.new_cache(1, 64)
    drafter.extend(cache, [Segment(0, 0, 23)], expected["input_ids"][0], expected["context_features"][0])
    _check_round(drafter, cache, expected["anchor"], expected, "round1")


def test_second_round_after_an_incremental_commit(
    case: tuple[DSparkDrafter, dict[str, Tensor]], target_taps: Taps
) -> None:
    drafter, expected = case
    tokens = torch.cat((expected["input_ids"][0], expected["round2_committed"][0]))
    taps = target_taps(tokens, drafter.tap_layers)
    torch.testing.assert_close(taps[:23], expected["context_features"][0], **TOLERANCE)
    cache = drafter.new_cache(1, 64)
    drafter.extend(cache, [Segment(0, 0, 23)], expected["input_ids"][0], expected["context_features"][0])
    drafter.propose(cache, [0], expected["anchor"].view(1), greedy_sampler)
    drafter.extend(cache, [Segment(0, 23, 3)], tokens[23:], taps[23:])
    _check_round(drafter, cache, expected["round2_anchor"], expected, "round2")


def test_second_round_from_scratch(case: tuple[DSparkDrafter, dict[str, Tensor]], target_taps: Taps) -> None:
    drafter, expected = case
    tokens = torch.cat((expected["input_ids"][0], expected["round2_committed"][0]))
    cache = drafter.new_cache(1, 26)
    drafter.extend(cache, [Segment(0, 0, 26)], tokens, target_taps(tokens, drafter.tap_layers))
    _check_round(drafter, cache, expected["round2_anchor"], expected, "round2")


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    drafter = load_drafter(GOLDEN / name)
    expected = load_file(GOLDEN / name / "expected_training.safetensors")
    input_ids, anchors, keep = expected["input_ids"], expected["anchors"], expected["anchor_keep"].bool()
    positions = (anchors[..., None] + torch.arange(drafter.block_size)).clamp(max=input_ids.shape[1] - 1)
    blocks = input_ids[torch.arange(len(input_ids))[:, None, None], positions]
    output = train(drafter, expected["context_features"], anchors, blocks, anchor_keep_BA=keep)
    supervised = expected["supervised"].bool() & keep[..., None]
    assert output.confidence_logits_BAG is not None
    assert int(supervised.sum()) > 20
    torch.testing.assert_close(
        output.logits_BAGD[supervised], expected["draft_logits"][supervised], check_dtype=False, **TOLERANCE
    )
    torch.testing.assert_close(
        output.confidence_logits_BAG[supervised], expected["confidence_logits"][supervised], **TOLERANCE
    )


def test_eagle3() -> None:
    """Greedy draft of the reference, in one piece and in two, and the training forward along the same tokens."""
    drafter = load_drafter(GOLDEN / "eagle3")
    expected = load_file(GOLDEN / "eagle3" / "expected.safetensors")
    tokens, taps = expected["input_ids"][0], expected["context_features"][0]
    for pieces in ([(0, 23)], [(0, 1), (1, 20), (20, 23)]):
        cache = drafter.new_cache(1, 23)
        for start, end in pieces:
            drafter.extend(cache, [Segment(0, start, end - start)], tokens[start:end], taps[start:end])
        recorder = _Recorder()
        block = drafter.propose(cache, [0], expected["anchor"][0], recorder)
        assert torch.equal(block.tokens_RG, expected["tokens"])
        torch.testing.assert_close(torch.stack(recorder.logits, 1), expected["logits"], **TOLERANCE)
    previous = torch.cat((expected["anchor"], expected["tokens"][:, :-1]), dim=1)
    output = train(drafter, taps[None], torch.tensor([[23]]), previous[None], token_ids_BS=tokens[None])
    torch.testing.assert_close(output.logits_BAGD[0], expected["logits"], **TOLERANCE)

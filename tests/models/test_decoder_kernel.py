"""The compiled int8 pass against the same layers run one by one in PyTorch."""

from __future__ import annotations

import logging

import pytest
import torch

from dspark.models import decoder
from dspark.models.decoder import Decoder
from dspark.models.int8_intrinsics import has_dot_products
from dspark.types import Segment
from tests.models.test_parity import CONFIGS, ours, random_model

needs_instructions = pytest.mark.skipif(not has_dot_products(), reason="this processor has no AVX512-VNNI")
LENGTH = 40


def states(model: Decoder, taps: tuple[int, ...] = (0, 2)) -> torch.Tensor:
    """Hidden states and taps of a text, in three passes of very different sizes."""
    text = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, LENGTH)
    outputs = []
    for start, end in ((0, 22), (22, 23), (23, LENGTH)):
        outputs.append(model.forward(text[start:end], [Segment(1, start, end - start)], cache, taps))
    return torch.cat([torch.cat([o.hidden_NH, *([] if o.taps_NT is None else [o.taps_NT])], 1) for o in outputs])


@needs_instructions
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_it_computes_what_the_layers_do_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours(random_model(CONFIGS[name]), "int8")
    compiled = states(model)
    assert model._kernel is not None
    monkeypatch.setattr(model, "_kernel", None)
    one_by_one = states(model)
    # Where a number lies in the middle between two int8 numbers, the last bit decides, and all that follows differs.
    same_row = (compiled - one_by_one).abs().amax(1) < 1e-4 * one_by_one.abs().amax()
    assert same_row.float().mean() > 0.7
    assert (compiled - one_by_one).norm() < 0.02 * one_by_one.norm()


@needs_instructions
@torch.no_grad()
def test_bits_do_not_depend_on_threads() -> None:
    model = ours(random_model(CONFIGS["gemma3"]), "int8")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = states(model)
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(states(model), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("taps", [(3, 1), (2, 0, 2), (1,)])
@torch.no_grad()
def test_taps_come_in_the_order_asked_for(taps: tuple[int, ...]) -> None:
    model = ours(random_model(CONFIGS["qwen3"]), "int8")
    hidden = model.config.hidden_size
    every = states(model, (0, 1, 2, 3)).split(hidden, 1)
    expected = torch.cat([every[0], *(every[1 + layer] for layer in taps)], 1)
    assert torch.equal(states(model, taps), expected)
    assert torch.equal(states(model, ()), every[0])


@torch.no_grad()
def test_a_processor_without_the_instructions_is_told_and_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = random_model(CONFIGS["llama"])
    exact = states(ours(reference))
    monkeypatch.setattr(decoder, "has_dot_products", lambda: False)
    decoder._announce_slow_int8.cache_clear()
    with caplog.at_level(logging.WARNING, "dspark"):
        models = [ours(reference, "int8") for _ in range(2)]
    assert sum("AVX512-VNNI" in record.message for record in caplog.records) == 1
    assert models[0]._kernel is None
    assert (states(models[0]) - exact).norm() < 0.05 * exact.norm()

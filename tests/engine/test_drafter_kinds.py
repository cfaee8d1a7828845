"""Every kind of drafter in the engine, on a tiny target of our own decoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.decoding import SamplingSettings
from dspark.drafters import (
    DraftBlock,
    Drafter,
    DrafterCache,
    DraftSampler,
    DSparkConfig,
    Eagle3Config,
    MtpConfig,
    TrainableDrafter,
    greedy_sampler,
)
from dspark.drafters.registry import AnyConfig, drafter_from_target
from dspark.engine.generation import generate
from dspark.engine.result import GenerationResult
from dspark.models.block_tables import BlockTables
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.types import Segment

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3-tiny-target"
PROMPT = (126, 150, 80, 31, 206)
# A vocabulary of seven words, so that untrained drafters are right now and then, and wrong as well.
WORDS = (3, 17, 40, 41, 77, 130, 200)
BANS = {token: -float("inf") for token in range(211) if token not in WORDS}
DRAFTERS = ("dspark", "dspark-rnn", "dflash", "eagle3", "mtp")


@cache
def tiny_target() -> Decoder:
    config = DecoderConfig.from_huggingface(json.loads((GOLDEN / "config.json").read_text()))
    return Decoder(config, load_file(GOLDEN / "model.safetensors"))


def make_config(name: str, *, reduced: bool = False) -> AnyConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 211, "draft_vocab_size": 60 if reduced else 211, "hidden_size": 64, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "num_target_layers": 6, "initializer_range": 0.2,
    }  # fmt: skip
    if name == "mtp":
        return MtpConfig(**sizes, target_layer_ids=(5,))
    if name == "eagle3":
        return Eagle3Config(**sizes, target_layer_ids=(1, 2, 4), ttt_length=4)
    rank = 0 if name == "dflash" else 8
    return DSparkConfig(
        **sizes, num_hidden_layers=2, target_layer_ids=(1, 2, 4), block_size=4, mask_token_id=210, markov_rank=rank,
        markov_head_type=None if rank == 0 else "rnn" if name == "dspark-rnn" else "vanilla",
        enable_confidence_head=rank > 0, confidence_head_with_markov=rank > 0,
    )  # fmt: skip


def make_drafter(name: str, *, reduced: bool = False) -> TrainableDrafter:
    ids = sorted({*WORDS[:4], *range(100, 156)}) if reduced else None
    generator = torch.Generator().manual_seed(0)
    return drafter_from_target(make_config(name, reduced=reduced), tiny_target(), ids, generator=generator)


class Watched:
    """A drafter whose every round is compared with one from a fresh cache over the committed text."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.block_size = drafter.block_size
        self.tap_layers = drafter.tap_layers
        self.draft_vocab_size = drafter.draft_vocab_size
        self.draft_token_ids_D = drafter.draft_token_ids_D
        self.has_confidence_head = drafter.has_confidence_head
        self.calibration = drafter.calibration
        self.texts: list[list[int]] = []
        self._tokens: list[int] = []

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> DrafterCache:
        return self.drafter.new_cache(num_slots, max_length, tables)

    def extend(self, cache: DrafterCache, segments: Sequence[Segment], token_ids_N: Tensor, taps_NT: Tensor) -> None:
        self._tokens[segments[0].start :] = token_ids_N.tolist()
        self.drafter.extend(cache, segments, token_ids_N, taps_NT)

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        length, target = cache.lengths[0], tiny_target()
        tokens_N = torch.tensor(self._tokens[:length])
        segment = Segment(0, 0, length)
        taps_NT = target.forward(tokens_N, [segment], target.new_cache(1, length), self.tap_layers).taps_NT
        assert taps_NT is not None
        fresh = self.drafter.new_cache(1, length)
        self.drafter.extend(fresh, [segment], tokens_N, taps_NT)
        seen: list[list[Tensor]] = [[], []]
        for memory, logits in zip((cache, fresh), seen, strict=True):

            def keep(k: int, logits_RD: Tensor, tokens_Rk: Tensor, logits: list[Tensor] = logits) -> Any:
                logits.append(logits_RD.clone())
                return greedy_sampler(k, logits_RD, tokens_Rk)

            self.drafter.propose(memory, slots, anchors_R, keep)
        torch.testing.assert_close(torch.stack(seen[0]), torch.stack(seen[1]), atol=1e-3, rtol=1e-3)
        self.texts.append([*self._tokens[:length], int(anchors_R[0])])
        return self.drafter.propose(cache, slots, anchors_R, sample, num_tokens)


def run(drafter: Drafter | None, settings: SamplingSettings, max_tokens: int = 40) -> GenerationResult:
    result = list(generate(tiny_target(), drafter, PROMPT, settings, max_tokens=max_tokens))[-1].result
    assert result is not None
    return result


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_does_not_depend_on_the_drafter_and_its_memory_on_what_was_rejected(
    name: str, seed: int | None, reduced: bool
) -> None:
    settings = SamplingSettings(temperature=0.0 if seed is None else 1.5, seed=seed, logit_bias=BANS)
    plain = run(None, settings)
    watched = Watched(make_drafter(name, reduced=reduced))
    result = run(watched, settings)
    assert result.token_ids == plain.token_ids
    assert set(result.token_ids) <= set(WORDS)
    text = [*PROMPT, *result.token_ids]
    assert all(seen == text[: len(seen)] for seen in watched.texts)
    assert [len(seen) for seen in watched.texts] == sorted({len(seen) for seen in watched.texts})
    assert result.accepted < result.verified  # so something was rolled back
    if seed is not None:
        assert result.accepted > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_unseeded_sampling_accepts_and_rejects(name: str) -> None:
    uniforms = torch.rand(2000, generator=torch.Generator().manual_seed(1)).double().tolist()
    settings = SamplingSettings(temperature=1.5, logit_bias=BANS)
    drafter = make_drafter(name)
    events = list(generate(tiny_target(), drafter, PROMPT, settings, max_tokens=60, random=iter(uniforms).__next__))
    result = events[-1].result
    assert result is not None
    assert len(result.token_ids) == 60
    assert 0 < result.accepted < result.verified
    assert result.verified_per_position[0] == max(result.verified_per_position)
    assert len(result.verified_per_position) == drafter.block_size


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_of_another_target_is_refused(name: str) -> None:
    config = make_config(name)
    layers = (6,) if name == "mtp" else config.target_layer_ids
    deeper = replace(config, num_target_layers=7, target_layer_ids=layers)
    with pytest.raises(ValueError, match="num_target_layers is 7 in the drafter but 6 in the target"):
        drafter_from_target(deeper, tiny_target())

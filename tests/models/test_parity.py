"""The decoder against transformers, family by family, on tiny random models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.instructions import has_dot_products
from dspark.types import Segment

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "llama-tied-biased": LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": LlamaConfig(**COMMON, head_dim=16),
    "llama-linear-rope": LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "llama-llama3-rope": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "llama-yarn-rope": LlamaConfig(**COMMON, rope_parameters=YARN),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2-sliding": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "qwen3-tied-biased": Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True, attention_bias=True),
    "gemma3": Gemma3TextConfig(
        **COMMON, head_dim=16, sliding_window=6, query_pre_attn_scalar=24, layer_types=None, sliding_window_pattern=2
    ),
    "gemma3-softcap-scaled": Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        sliding_window=4,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
}


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        # Biases and norms start at zero or one; a swapped or forgotten one would not show.
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(model: PreTrainedModel, compute_dtype: str = "float32") -> Decoder:
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Decoder(DecoderConfig.from_huggingface(model.config.to_dict()), weights, compute_dtype=compute_dtype)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_ragged_chunks_equal_whole_texts_in_transformers(name: str) -> None:
    reference = random_model(CONFIGS[name])
    model = ours(reference)
    texts = [torch.randint(0, 97, (length,)) for length in (23, 9, 17)]
    expected = [reference(text[None], output_hidden_states=True) for text in texts]
    cache = model.new_cache(num_slots=5, max_length=32)
    slots = (3, 0, 4)  # not neighbours, not in order
    taps = (0, 2)
    # Three passes that cut every text at a different place, as prefill, verification and decoding do.
    cuts = ((0, 11, 12, 23), (0, 3, 8, 9), (0, 1, 16, 17))
    logits: list[list[torch.Tensor]] = [[], [], []]
    tapped: list[list[torch.Tensor]] = [[], [], []]
    for chunk in range(3):
        segments = [
            Segment(slot, cut[chunk], cut[chunk + 1] - cut[chunk]) for slot, cut in zip(slots, cuts, strict=True)
        ]
        flat = torch.cat([text[s.start : s.end] for text, s in zip(texts, segments, strict=True)])
        output = model.forward(flat, segments, cache, taps)
        assert output.taps_NT is not None
        lengths = [segment.length for segment in segments]
        for row, (piece, tap) in enumerate(
            zip(model.logits(output.hidden_NH).split(lengths), output.taps_NT.split(lengths), strict=True)
        ):
            logits[row].append(piece)
            tapped[row].append(tap)
    for row in range(3):
        torch.testing.assert_close(torch.cat(logits[row]), expected[row].logits[0], atol=1e-4, rtol=0)
        states = torch.cat([expected[row].hidden_states[layer + 1][0] for layer in taps], dim=-1)
        torch.testing.assert_close(torch.cat(tapped[row]), states, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_rolled_back_positions_leave_no_trace(name: str) -> None:
    model = ours(random_model(CONFIGS[name]))
    text, wrong = torch.randint(0, 97, (12,)), torch.randint(0, 97, (6,))
    straight, detour = model.new_cache(1, 16), model.new_cache(1, 16)
    expected = model.forward(text, [Segment(0, 0, 12)], straight).hidden_NH[8:]
    model.forward(text[:8], [Segment(0, 0, 8)], detour)
    model.forward(wrong, [Segment(0, 8, 6)], detour)
    detour.truncate(0, 8)
    actual = model.forward(text[8:], [Segment(0, 8, 4)], detour).hidden_NH
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_lower_precisions_stay_near_float32() -> None:
    reference = random_model(CONFIGS["qwen3"])
    text = torch.randint(0, 97, (24,))
    probs = {}
    for dtype in ("float32", "bfloat16", "int8"):
        model = ours(reference, dtype)
        output = model.forward(text, [Segment(0, 0, 24)], model.new_cache(1, 24))
        probs[dtype] = model.logits(output.hidden_NH).softmax(-1)
        assert probs[dtype].dtype == torch.float32
    for dtype, limit in (("bfloat16", 0.05), ("int8", 0.1)):
        distance = 0.5 * (probs[dtype] - probs["float32"]).abs().sum(-1).mean()
        assert 0 < distance < limit, dtype


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        (LlamaConfig(**COMMON, hidden_act="relu").to_dict(), "hidden_act"),
        ({**LlamaConfig(**COMMON).to_dict(), "pretraining_tp": 2}, "pretraining_tp"),
        ({**LlamaConfig(**COMMON).to_dict(), "sliding_window": 64}, r"sliding_window \(64\)"),
        (
            {**Qwen2Config(**COMMON).to_dict(), "dual_chunk_attention_config": {"chunk_size": 8}},
            "dual_chunk_attention_config",
        ),
        ({**LlamaConfig(**COMMON).to_dict(), "quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).to_dict(),
            "rope_type",
        ),
        (
            {
                **LlamaConfig(**COMMON).to_dict(),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            "partial_rotary_factor",
        ),
        (
            {**Gemma3TextConfig(**COMMON, head_dim=8).to_dict(), "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping",
        ),
        (
            {**Gemma3TextConfig(**COMMON, head_dim=8).to_dict(), "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        DecoderConfig.from_huggingface(config)


def test_settings_that_change_nothing_are_let_through() -> None:
    config = LlamaConfig(**COMMON).to_dict()
    extras = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "_note": 1}
    assert DecoderConfig.from_huggingface({**config, **extras}) == DecoderConfig.from_huggingface(config)


def test_checkpoint_tensors_are_checked() -> None:
    model = random_model(CONFIGS["llama"])
    config = DecoderConfig.from_huggingface(model.config.to_dict())
    weights = dict(model.state_dict())
    with pytest.raises(ValueError, match=r"does not use.*extra\.weight"):
        Decoder(config, {**weights, "extra.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(3, 3\)"):
        Decoder(config, {**weights, "lm_head.weight": torch.zeros(3, 3)})
    del weights["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        Decoder(config, weights)
    with pytest.raises(ValueError, match="float16"):
        Decoder(config, weights, compute_dtype="float16")


def test_segments_are_checked_before_anything_is_written() -> None:
    model = ours(random_model(CONFIGS["llama"]))
    cache = model.new_cache(2, 8)
    tokens = torch.arange(4)
    for segments, message in (
        ([Segment(0, 0, 3)], "segments hold 3 tokens"),
        ([Segment(0, 1, 4)], "starts at 1"),
        ([Segment(2, 0, 4)], "slot 2"),
        ([Segment(0, 0, 2), Segment(0, 2, 2)], "named twice"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward(tokens, segments, cache)
    model.forward(torch.arange(8), [Segment(0, 0, 8)], cache)
    with pytest.raises(ValueError, match="beyond the cache"):
        model.forward(tokens, [Segment(0, 8, 4)], cache)
    assert cache.lengths == [8, 0]
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(0, 9)
    with pytest.raises(ValueError, match="tap layers"):
        model.forward(tokens, [Segment(1, 0, 4)], cache, (4,))
    assert cache.lengths == [8, 0]


@torch.no_grad()
def test_a_cache_of_another_model_is_refused_in_floats_too() -> None:
    model = ours(random_model(CONFIGS["llama"]))
    for name, compute_dtype in (("gemma3", "float32"), ("llama", "bfloat16")):
        cache = ours(random_model(CONFIGS[name]), compute_dtype).new_cache(1, 16)
        with pytest.raises(ValueError, match="take one from its new_cache"):
            model.forward(torch.tensor([1, 2]), [Segment(0, 0, 2)], cache)
        assert cache.lengths == [0]


@pytest.mark.parametrize("compute_dtype", ["float32", "int8"])
@torch.no_grad()
def test_a_pass_that_is_refused_leaves_the_cache_as_it_was(compute_dtype: str) -> None:
    if compute_dtype == "int8" and not has_dot_products():
        pytest.skip("this processor has no instructions for it")
    model = ours(random_model(CONFIGS["llama"]), compute_dtype)
    cache = model.new_cache(2, 16)
    one, two = [Segment(0, 0, 1)], [Segment(0, 0, 2)]
    for ids, segments, rows, error in (
        (torch.tensor([1, 97]), two, (), IndexError),
        (torch.tensor([1, -1]), two, (), IndexError),
        (torch.tensor([1.0, 2.0]), two, (), ValueError),
        (torch.tensor([[1, 2]]), one, (), ValueError),
        (torch.tensor([True, False]), two, (), ValueError),
        (torch.tensor([], dtype=torch.int64), [], (), ValueError),
        (torch.tensor([1, 2]), two, (0.5,), ValueError),
        (torch.tensor([1, 2]), two, (2,), ValueError),
        (torch.tensor([1, 2]), two, (-1,), ValueError),
        (torch.tensor([1, 2]), two, [[0, 1]], ValueError),
    ):
        with pytest.raises(error):
            model.forward(ids, segments, cache, (), rows)  # type: ignore[arg-type]
        assert cache.lengths == [0, 0]
    rows = np.array([1, 0])
    picked = model.forward(torch.tensor([1, 2]), two, cache, (), rows).logits_MV  # type: ignore[arg-type]
    assert picked is not None
    assert torch.equal(picked, model.logits(model.forward(torch.tensor([1, 2]), two, cache).hidden_NH)[rows])


def test_slots_that_do_not_exist_are_refused() -> None:
    cache = ours(random_model(CONFIGS["llama"])).new_cache(2, 16)
    for slot in (-1, 2):
        for change in (cache.truncate, cache.adopt):
            with pytest.raises(ValueError, match=f"slot {slot} is unknown"):
                change(slot, 0)

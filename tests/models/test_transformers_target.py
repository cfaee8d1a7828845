"""The adapter against the models it wraps, family by family, on tiny random ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from dspark.decoding import SamplingSettings
from dspark.engine.generation import generate
from dspark.models.block_tables import BlockTables
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target, TargetCache, TargetConfig
from dspark.models.transformers_anatomy import text_model
from dspark.models.transformers_cache import SlotCache, layer_kinds
from dspark.models.transformers_target import TransformersTarget
from dspark.types import Segment
from tests.models.test_parity import CONFIGS
from tests.models.test_parity import random_model as native_model
from tests.models.tiny_transformers import FAMILIES, VOCABULARY, WINDOW, random_model, tiny_config

LENGTH = 4 * WINDOW  # longer than the window, so that a wrong one shows


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, TransformersTarget]:
    """A model and the target made of it."""
    model = random_model(tiny_config(request.param))
    return model, TransformersTarget(model)


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def final_norm(model: PreTrainedModel) -> torch.nn.Module:
    names = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
    return next(module for name, module in text_model(model).named_children() if name in names)


@torch.no_grad()
def test_logits_and_taps_are_the_models_own(pair: tuple[PreTrainedModel, TransformersTarget]) -> None:
    model, target = pair
    ids = text(LENGTH)
    expected = model(ids[None], output_hidden_states=True)
    layers = tuple(range(target.config.num_layers))
    output = target.forward(ids, [Segment(0, 0, LENGTH)], target.new_cache(1, LENGTH), layers)
    logits = target.logits(output.hidden_NH)
    assert logits.dtype == torch.float32
    close(logits, expected.logits[0])
    assert output.taps_NT is not None
    taps = output.taps_NT.split(target.config.hidden_size, dim=-1)
    for layer in layers[:-1]:
        close(taps[layer], expected.hidden_states[layer + 1][0])
    # The last tap is before the final norm, which is all that lies between it and the last hidden state.
    close(final_norm(model)(taps[-1]), expected.hidden_states[-1][0])
    swapped = target.forward(ids, [Segment(0, 0, LENGTH)], target.new_cache(1, LENGTH), (1, 0)).taps_NT
    assert swapped is not None
    close(swapped, torch.cat([taps[1], taps[0]], dim=-1))


@torch.no_grad()
def test_the_formula_of_the_protocol_gives_the_logits(pair: tuple[PreTrainedModel, TransformersTarget]) -> None:
    model, target = pair
    ids = text(9)
    hidden = target.forward(ids, [Segment(0, 0, 9)], target.new_cache(1, 9)).hidden_NH
    logits = hidden @ target.lm_head_weight_VH.T
    if target.lm_head_bias_V is not None:
        logits = logits + target.lm_head_bias_V
    if (cap := target.config.final_softcap) is not None:
        logits = cap * torch.tanh(logits / cap)
    close(logits, model(ids[None]).logits[0])
    assert target.embedding_weight_VH.shape == target.lm_head_weight_VH.shape
    assert target.embedding_weight_VH.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@torch.no_grad()
def test_chunks_and_a_rollback_equal_one_pass(pair: tuple[PreTrainedModel, TransformersTarget]) -> None:
    _, target = pair
    ids, wrong = text(LENGTH), text(WINDOW, seed=1)
    whole = target.forward(ids, [Segment(0, 0, LENGTH)], target.new_cache(1, LENGTH), (0,))
    cache = target.new_cache(1, LENGTH + WINDOW)
    pieces = []
    for start, end in ((0, 3), (3, 4), (4, LENGTH - 5), (LENGTH - 5, LENGTH)):
        output = target.forward(ids[start:end], [Segment(0, start, end - start)], cache, (0,))
        pieces.append(output)
        # Rejected draft tokens behind every piece, as verification leaves them.
        target.forward(wrong, [Segment(0, end, WINDOW)], cache)
        cache.truncate(0, end)
    assert cache.lengths == [LENGTH]
    close(torch.cat([piece.hidden_NH for piece in pieces]), whole.hidden_NH)
    taps = [piece.taps_NT for piece in pieces if piece.taps_NT is not None]
    assert whole.taps_NT is not None
    close(torch.cat(taps), whole.taps_NT)
    # Far back, over several windows.
    cache.truncate(0, 2)
    again = target.forward(ids[2:], [Segment(0, 2, LENGTH - 2)], cache)
    close(again.hidden_NH, whole.hidden_NH[2:])


@torch.no_grad()
def test_ragged_segments_equal_single_requests(pair: tuple[PreTrainedModel, TransformersTarget]) -> None:
    _, target = pair
    texts = [text(length, seed=length) for length in (17, 9, 12)]
    single = [target.forward(ids, [Segment(0, 0, len(ids))], target.new_cache(1, 32), (1,)) for ids in texts]
    cache = target.new_cache(num_slots=5, max_length=32)
    slots = (3, 0, 4)  # not neighbours, not in order
    cuts = ((0, 6, 16, 17), (0, 6, 7, 9), (0, 3, 5, 12))
    hidden: list[list[torch.Tensor]] = [[], [], []]
    taps: list[list[torch.Tensor]] = [[], [], []]
    for chunk in range(3):
        segments = [
            Segment(slot, cut[chunk], cut[chunk + 1] - cut[chunk]) for slot, cut in zip(slots, cuts, strict=True)
        ]
        flat = torch.cat([ids[s.start : s.end] for ids, s in zip(texts, segments, strict=True)])
        output = target.forward(flat, segments, cache, (1,))
        assert output.taps_NT is not None
        lengths = [segment.length for segment in segments]
        for row, (states, tap) in enumerate(
            zip(output.hidden_NH.split(lengths), output.taps_NT.split(lengths), strict=True)
        ):
            hidden[row].append(states)
            taps[row].append(tap)
    for row, expected in enumerate(single):
        close(torch.cat(hidden[row]), expected.hidden_NH)
        assert expected.taps_NT is not None
        close(torch.cat(taps[row]), expected.taps_NT)


def test_greedy_generation_is_that_of_transformers(pair: tuple[PreTrainedModel, TransformersTarget]) -> None:
    model, target = pair
    prompt, count = text(WINDOW + 3), 2 * WINDOW
    expected = model.generate(
        prompt[None], do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None, use_cache=True
    )[0, len(prompt) :]
    *_, last = generate(target, None, prompt.tolist(), SamplingSettings(temperature=0.0), max_tokens=count)
    assert last.result is not None
    assert list(last.result.token_ids) == expected.tolist()


@pytest.mark.parametrize(
    "name", ["llama-tied-biased", "llama-yarn-rope", "qwen2-sliding", "qwen3", "gemma3-softcap-scaled"]
)
@torch.no_grad()
def test_native_families_agree_with_the_native_decoder(name: str) -> None:
    model = native_model(CONFIGS[name])
    weights = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    native: Target = Decoder(DecoderConfig.from_huggingface(model.config.to_dict()), weights)
    adapted: Target = TransformersTarget(model)
    fields = [field for field in TargetConfig.__dict__ if not field.startswith("_")]
    assert len(fields) == 11
    for field in fields:
        assert getattr(adapted.config, field) == getattr(native.config, field), field
    assert adapted.compute_dtype == native.compute_dtype == "float32"
    assert native.lm_head_bias_V is None
    assert adapted.lm_head_bias_V is None
    ids = text(LENGTH)
    outputs = []
    for target in (native, adapted):
        cache: TargetCache = target.new_cache(2, 32)
        first = target.forward(ids[:10], [Segment(1, 0, 10)], cache, (0, 2, 3))
        target.forward(ids[:4], [Segment(1, 10, 4)], cache)
        cache.truncate(1, 10)
        second = target.forward(ids[10:], [Segment(1, 10, LENGTH - 10)], cache, (0, 2, 3), [4, 0])
        torch.testing.assert_close(second.logits_MV, target.logits(second.hidden_NH[[4, 0]]))
        assert first.taps_NT is not None
        assert second.taps_NT is not None
        hidden = torch.cat([first.hidden_NH, second.hidden_NH])
        outputs.append((target.logits(hidden), torch.cat([first.taps_NT, second.taps_NT]), target.embed(ids)))
    for ours, theirs in zip(*outputs, strict=True):
        close(theirs, ours)


def test_embeddings_are_what_the_first_layer_reads() -> None:
    ids = text(5)
    granite = random_model(tiny_config("granite"))
    close(TransformersTarget(granite).embed(ids), granite.get_input_embeddings()(ids) * 12.0)
    with pytest.raises(ValueError, match="reads more than the token's embedding"):
        TransformersTarget(random_model(tiny_config("gpt2"))).embed(ids)


def test_segments_and_caches_that_do_not_fit_are_refused() -> None:
    target = TransformersTarget(random_model(tiny_config("olmo2")))
    cache = target.new_cache(1, 8)
    with pytest.raises(ValueError, match="segments hold 3 tokens, token_ids 4"):
        target.forward(text(4), [Segment(0, 0, 3)], cache)
    with pytest.raises(ValueError, match=r"tap layers \[3\] do not exist: the target has layers 0 to 2"):
        target.forward(text(4), [Segment(0, 0, 4)], cache, (3,))
    with pytest.raises(ValueError, match="position 8 is beyond the cache's 8 positions"):
        target.forward(text(9), [Segment(0, 0, 9)], cache)
    with pytest.raises(ValueError, match="starts at 2, the slot holds 0"):
        target.forward(text(4), [Segment(0, 2, 4)], cache)
    for unknown in (-1, target.config.vocab_size):
        with pytest.raises(IndexError, match="an id outside the vocabulary"):
            target.forward(torch.tensor([1, unknown]), [Segment(0, 0, 2)], cache)
    assert cache.lengths == [0]
    with pytest.raises(ValueError, match="max_length is 65, the target's context holds 64"):
        target.new_cache(1, 65)
    with pytest.raises(ValueError, match="at least one slot"):
        target.new_cache(0, 8)
    assert not target.shares_blocks
    with pytest.raises(ValueError, match="cannot share blocks: leave tables out"):
        target.new_cache(1, 8, BlockTables.contiguous(1, 8, torch.device("cpu")))
    cache.adopt(0, 0)
    with pytest.raises(ValueError, match="slot 0 cannot adopt 1 positions: a transformers target shares no blocks"):
        cache.adopt(0, 1)
    for slot in (-1, 1):
        with pytest.raises(ValueError, match=f"slot {slot} is unknown"):
            cache.adopt(slot, 0)
    native = Decoder(
        DecoderConfig.from_huggingface(CONFIGS["qwen3"].to_dict()), native_model(CONFIGS["qwen3"]).state_dict()
    )
    with pytest.raises(TypeError, match="KVCache of another target"):
        target.forward(text(4), [Segment(0, 0, 4)], native.new_cache(1, 8))
    with pytest.raises(TypeError, match="SlotCache of another target"):
        native.forward(text(4), [Segment(0, 0, 4)], cache)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mamba", {}, r"model_type 'mamba' cannot be a target: 3 of its 3 layers .* recurrent state"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
            r"model_type 'qwen3_next' cannot be a target: 2 of its 3 layers \(the first is 0\) keep a recurrent state",
        ),
        ("deepseek_v32", {}, "'deepseek_v32' cannot be a target: .* an index beside its keys and values"),
        ("falcon_h1", {}, "'falcon_h1' cannot be a target: .* recurrent state"),
        ("deepseek_v4", {}, "'deepseek_v4' keeps a state of its own kind"),
    ],
)
def test_a_state_that_cannot_be_rolled_back_is_refused_by_name(
    family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layer_kinds(CONFIG_MAPPING[family](num_hidden_layers=3, **settings))


def test_a_recurrent_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'mamba' cannot be a target"):
        TransformersTarget(random_model(tiny_config("mamba", state_size=4)))


def test_states_outside_the_cache_are_found() -> None:
    """Nothing in the config says so: a recurrent model without a cache, and attention to both sides."""
    rwkv = tiny_config("rwkv", attention_hidden_size=32, context_length=64, max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"RwkvForCausalLM .* cannot be a target"):
        TransformersTarget(random_model(rwkv))
    both_sides = random_model(tiny_config("gemma4_text", use_bidirectional_attention="all"))
    with pytest.raises(ValueError, match=r"in two passes, .* Its attention is not causal"):
        TransformersTarget(both_sides)


def test_models_older_than_the_common_interface_are_refused() -> None:
    with pytest.raises(ValueError, match=r"OpenAIGPTLMHeadModel .* cannot be a target: it does not work as models"):
        TransformersTarget(random_model(tiny_config("openai-gpt", n_embd=32, n_layer=3, n_head=4, n_positions=64)))


def test_logits_that_no_formula_gives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config("granite"))
    forward = model.forward

    def with_something_else(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.sin()
        return output

    monkeypatch.setattr(model, "forward", with_something_else)
    with pytest.raises(ValueError, match=r"its logits are not those of its LM head .* logit scale one of \[8.0\]"):
        TransformersTarget(model)


def test_layers_whose_outputs_are_not_the_hidden_states_are_refused() -> None:
    """Gemma 3n carries several streams from layer to layer."""
    config = tiny_config(
        "gemma3n_text",
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0, 0.0],
    )
    with pytest.raises(ValueError, match="the output of decoder layer 0 is not its hidden_states"):
        TransformersTarget(random_model(config))


def test_bfloat16_stays_near_float32_and_float16_is_refused() -> None:
    config = tiny_config("mixtral")
    exact = TransformersTarget(random_model(config))
    rounded = TransformersTarget(random_model(config).to(torch.bfloat16))
    assert rounded.compute_dtype == "bfloat16"
    assert rounded.dtype == torch.bfloat16
    assert rounded.fingerprint != exact.fingerprint
    assert TransformersTarget(random_model(config).to(torch.bfloat16), fingerprint="f").fingerprint == "f"
    ids = text(12)
    probs = []
    for target in (exact, rounded):
        output = target.forward(ids, [Segment(0, 0, 12)], target.new_cache(1, 12), (0,))
        assert output.hidden_NH.dtype == target.dtype
        probs.append(target.logits(output.hidden_NH).softmax(-1))
    assert 0 < float((probs[0] - probs[1]).abs().sum(-1).median()) < 0.2
    with pytest.raises(ValueError, match=r"is in torch.float16; load it in one of \['bfloat16', 'float32'\]"):
        TransformersTarget(random_model(config).to(torch.float16))


def test_the_fingerprint_is_of_the_numbers() -> None:
    model = random_model(tiny_config("olmo2"))
    first = TransformersTarget(model).fingerprint
    assert TransformersTarget(random_model(tiny_config("olmo2"))).fingerprint == first
    with torch.no_grad():
        model.get_decoder().layers[2].mlp.up_proj.weight.mul_(1.01)
    assert TransformersTarget(model).fingerprint != first


def test_the_context_ends_where_a_rotation_changes() -> None:
    """Keys in the cache keep the rotation they were written with, so a text must not grow past the change."""
    config = tiny_config(
        "phi3",
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 32,
        },
    )
    target = TransformersTarget(random_model(config))
    assert target.config.max_position_embeddings == 32
    with pytest.raises(ValueError, match="context holds 32"):
        target.new_cache(1, 33)


def test_a_cache_takes_memory_when_it_is_used() -> None:
    cache = SlotCache(layer_kinds=(True,), num_slots=2, max_length=10)
    rows = cache.rows([1], 0)
    keys = torch.ones(1, 2, 3, 4)
    assert rows.get_mask_sizes(3, 0) == (3, 0)
    seen, _ = rows.update(keys, keys, 0)
    assert torch.equal(seen, keys)
    later, _ = cache.rows([0, 1], 2).update(keys.expand(2, -1, -1, -1) * 2, keys.expand(2, -1, -1, -1), 0)
    assert later[:, 0, :, 0].tolist() == [[0, 0, 2, 2, 2], [1, 1, 2, 2, 2]]

"""The compiled int8 pass against the same layers run one by one in PyTorch."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama import LlamaConfig

from dspark.models import decoder, loading
from dspark.models.attention import attend
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.instructions import has_dot_products
from dspark.models.rope import RopeSettings
from dspark.types import Segment
from tests.models.test_parity import COMMON, CONFIGS, ours, random_model

needs_instructions = pytest.mark.skipif(not has_dot_products(), reason="this processor has no instructions for it")
LENGTH = 40


def states(model: Decoder, taps: tuple[int, ...] = (0, 2)) -> torch.Tensor:
    """Hidden states and taps of a text, in three passes of very different sizes."""
    text = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, LENGTH)
    outputs = []
    for start, end in ((0, 22), (22, 23), (23, LENGTH)):
        outputs.append(model.forward(text[start:end], [Segment(1, start, end - start)], cache, taps))
    return torch.cat([torch.cat([o.hidden_NH, *([] if o.taps_NT is None else [o.taps_NT])], 1) for o in outputs])


def layer_by_layer(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model run in PyTorch, with keys and values as exact as the compiled pass keeps them."""

    def attend_to_halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        return attend(q, k.half().float(), v.half().float(), *more, **options)

    monkeypatch.setattr(model, "_kernel", None)
    monkeypatch.setattr(decoder, "attend", attend_to_halves)


@needs_instructions
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_it_computes_what_the_layers_do_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours(random_model(CONFIGS[name]), "int8")
    compiled = states(model)
    assert model._kernel is not None
    layer_by_layer(model, monkeypatch)
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


def test_a_processor_without_the_instructions_computes_in_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "has_dot_products", lambda: False)
    with pytest.raises(ValueError, match=r"int8 needs a processor with AVX2 .*DSPARK_INT8, NUMBA_.*; use bfloat16"):
        ours(random_model(CONFIGS["llama"]), "int8")
    config = DecoderConfig.from_huggingface(CONFIGS["llama"].to_dict())
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda device: True)
    assert loading.resolve_dtype("auto", "cpu", config) == "bfloat16"


@needs_instructions
def test_heads_that_the_compiled_attention_does_not_take_are_computed_in_other_types() -> None:
    """Attention of such heads is padded, and their bits would depend on how a text is cut into passes."""
    reference = random_model(LlamaConfig(**COMMON, head_dim=12))
    with pytest.raises(ValueError, match=r"int8 needs heads of a multiple of 8 dimensions.* have 12; use bfloat16"):
        ours(reference, "int8")
    config = DecoderConfig.from_huggingface(reference.config.to_dict())
    assert loading.resolve_dtype("auto", "cpu", config) != "int8"
    assert loading.resolve_dtype("auto", "cpu", replace(config, head_dim=96)) == "int8"


def test_what_auto_took_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig.from_huggingface(CONFIGS["llama"].to_dict())
    odd = replace(config, head_dim=12)
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda device: True)
    for is_there, each, beginning, reason in (
        (True, config, "mine runs in int8, the fastest here", "is nearer to its weights"),
        (True, odd, "mine runs in bfloat16: the faster int8 needs heads of a multiple of 8", "have 12"),
        (False, config, "mine runs in bfloat16: the faster int8 needs a processor with AVX2", "DSPARK_INT8"),
    ):
        monkeypatch.setattr(decoder, "has_dot_products", lambda is_there=is_there: is_there)
        (notice,) = loading._dtype_notices("mine", each, "auto", "cpu")
        assert notice.startswith(beginning)
        assert reason in notice
    assert loading._dtype_notices("mine", config, "bfloat16", "cpu") == ()
    assert loading._dtype_notices("mine", config, "auto", "cuda") == ()


@needs_instructions
@torch.no_grad()
def test_a_block_outside_the_cache_is_noticed() -> None:
    """By the compiled attention, whose threads say so each for itself."""
    model = ours(random_model(CONFIGS["llama"]), "int8")
    cache = model.new_cache(1, 64)
    model.forward(torch.arange(1, 21), [Segment(0, 0, 20)], cache)
    before = cache.tables.tables_SB.clone()
    cache.tables.tables_SB[0, 0] = 99
    with pytest.raises(ValueError, match="a slot, position or block of the pass is outside"):
        model.forward(torch.tensor([1]), [Segment(0, 20, 1)], cache)
    cache.tables.tables_SB.copy_(before)
    model.forward(torch.tensor([1]), [Segment(0, 20, 1)], cache)


@needs_instructions
@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    """The compiled pass would write beside it."""
    model = ours(random_model(CONFIGS["gemma3"]), "int8")
    for name, compute_dtype in (("llama", "int8"), ("gemma3", "bfloat16"), ("gemma3", "float32")):
        cache = ours(random_model(CONFIGS[name]), compute_dtype).new_cache(1, 16)
        with pytest.raises(ValueError, match="take one from its new_cache"):
            model.forward(torch.tensor([1, 2]), [Segment(0, 0, 2)], cache)
        assert cache.lengths == [0]
    cache = model.new_cache(1, 16)
    cache.values = cache.values.float()
    with pytest.raises(ValueError, match=r"the cache holds keys and values .* in torch\.float16 and torch\.float32"):
        model.forward(torch.tensor([1, 2]), [Segment(0, 0, 2)], cache)


@needs_instructions
@torch.no_grad()
def test_keys_and_values_take_half_of_what_float32_takes() -> None:
    reference = random_model(CONFIGS["llama"])
    caches = [ours(reference, compute_dtype).new_cache(3, 40) for compute_dtype in ("int8", "float32")]
    assert caches[0].keys.dtype == caches[0].values.dtype == torch.float16
    assert 2 * caches[0].nbytes_per_block == caches[1].nbytes_per_block


@needs_instructions
@torch.no_grad()
def test_each_key_is_a_column_and_each_value_a_row_of_its_block() -> None:
    model = ours(random_model(CONFIGS["qwen3"]), "int8")
    float_model = ours(random_model(CONFIGS["qwen3"]), "int8")
    float_model._kernel = None
    text = torch.arange(1, 31)
    caches = [model.new_cache(2, 40), float_model.new_cache(2, 40)]
    for each, cache in zip((model, float_model), caches, strict=True):
        each.forward(text, [Segment(1, 0, 30)], cache)
    first = slice(48, 78)  # where slot 1 begins
    keys_gDP = caches[0].keys[0].transpose(1, 2).flatten(2)
    torch.testing.assert_close(keys_gDP[..., first].mT.float(), caches[1].keys[0][:, first], rtol=1e-3, atol=1e-4)
    values_gPD = caches[0].values[0][:, first].float()
    torch.testing.assert_close(values_gPD, caches[1].values[0][:, first], rtol=1e-3, atol=1e-4)
    assert not caches[0].values[:, :, :48].any()
    assert not caches[0].keys[:, :, :3].any()


@needs_instructions
@torch.no_grad()
def test_a_copy_outlives_the_original() -> None:
    model = ours(random_model(CONFIGS["qwen3"]), "int8")
    expected = states(model)
    copied = copy.deepcopy(model)
    for layer in model._layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            linear.packed.zero_()  # type: ignore[attr-defined]
    del model
    gc.collect()
    assert torch.equal(states(copied), expected)


@needs_instructions
@torch.no_grad()
def test_norms_of_a_checkpoint_may_be_strided() -> None:
    reference = random_model(CONFIGS["llama"])
    weights = {name: tensor.detach().clone() for name, tensor in reference.state_dict().items()}
    strided = dict(weights)
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(0.7)
            strided[name] = torch.tensor([0.7]).expand(tensor.shape)
    config = DecoderConfig.from_huggingface(reference.config.to_dict())
    models = [Decoder(config, tensors, compute_dtype="int8") for tensors in (weights, strided)]
    assert torch.equal(states(models[0]), states(models[1]))


def random_decoder(config: DecoderConfig, seed: int) -> Decoder:
    c, generator = config, torch.Generator().manual_seed(seed)
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    for index in range(c.num_layers):
        linears = {
            "self_attn.q_proj": (q_size, c.hidden_size, c.qkv_bias),
            "self_attn.k_proj": (kv_size, c.hidden_size, c.qkv_bias),
            "self_attn.v_proj": (kv_size, c.hidden_size, c.qkv_bias),
            "self_attn.o_proj": (c.hidden_size, q_size, c.output_bias),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (c.hidden_size,),
            "post_attention_layernorm.weight": (c.hidden_size,),
        }
        for name, (size_out, size_in, has_bias) in linears.items():
            layer[f"{name}.weight"] = (size_out, size_in)
            if has_bias:
                layer[f"{name}.bias"] = (size_out,)
        if c.qk_norm:
            layer |= {f"self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
        if c.sandwich_norms:
            layer |= {f"{n}_feedforward_layernorm.weight": (c.hidden_size,) for n in ("pre", "post")}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[1] ** -0.5 if len(shape) > 1 else 0.2) + (len(shape) < 2)
        for name, shape in shapes.items()
    }
    return Decoder(config, weights, compute_dtype="int8")


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    head_dim, group = draw(st.sampled_from([(8, 2), (16, 2), (24, 3)]))  # each is compiled anew
    kv_heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    flags: dict[str, Any] = {
        name: draw(st.booleans())
        for name in ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "norm_adds_one", "sandwich_norms")
    }
    return DecoderConfig(
        vocab_size=draw(st.integers(20, 70)),
        hidden_size=draw(st.integers(5, 110)),
        intermediate_size=draw(st.integers(1, 130)),
        num_layers=layers,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope=RopeSettings.default(head_dim, 1e4),
        sliding_rope=draw(st.sampled_from([None, RopeSettings.default(head_dim, 100.0)])),
        rope_theta=1e4,
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        query_scale=head_dim**-0.5,
        sliding_window=draw(st.integers(1, 40)),
        sliding_layers=tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        **flags,
    )


@needs_instructions
@given(
    config=configs(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
@torch.no_grad()
def test_any_shape_is_computed_as_layer_by_layer_and_each_text_as_if_alone(
    config: DecoderConfig, lengths: list[int], threads: int, seed: int, data: st.DataObject
) -> None:
    model = random_decoder(config, seed)
    taps = data.draw(st.lists(st.integers(0, config.num_layers - 1), max_size=4))
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]
    embedding = model.embedding_weight_VH.clone()

    def run(which: list[int], slots: list[int]) -> torch.Tensor:
        segments = [Segment(slot, 0, lengths[index]) for slot, index in zip(slots, which, strict=True)]
        cache = model.new_cache(len(texts), 30)
        output = model.forward(torch.cat([texts[index] for index in which]), segments, cache, taps)
        return torch.cat([output.hidden_NH, *([] if output.taps_NT is None else [output.taps_NT])], 1)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = run(list(range(len(texts))), list(reversed(range(len(texts)))))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat([run([index], [0]) for index in range(len(texts))]))
    assert torch.equal(model.embedding_weight_VH, embedding)
    with pytest.MonkeyPatch.context() as monkeypatch:
        layer_by_layer(model, monkeypatch)
        one_by_one = run(list(range(len(texts))), list(range(len(texts))))
    assert together.shape == one_by_one.shape
    # A number in the middle between two int8 numbers may go either way, and all that follows it differs a little.
    assert (together - one_by_one).norm() < 0.1 * one_by_one.norm()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_pass_gives_the_logits_of_the_rows_that_are_asked_for(name: str, dtype: str) -> None:
    model = ours(random_model(CONFIGS[name]), dtype)
    tokens, segments = torch.arange(12) % 97, [Segment(0, 0, 5), Segment(1, 0, 7)]
    rows = [11, 4, 0, 4]  # in any order, and one twice
    output = model.forward(tokens, segments, model.new_cache(2, LENGTH), (1,), rows)
    assert output.logits_MV is not None
    assert output.logits_MV.is_contiguous()
    torch.testing.assert_close(output.logits_MV, model.logits(output.hidden_NH[rows]), atol=0, rtol=0)
    assert model.forward(tokens, segments, model.new_cache(2, LENGTH)).logits_MV is None


@pytest.mark.parametrize("rows", [[12], [3, -1]])
def test_rows_that_are_not_in_the_pass_are_refused_before_anything_is_written(rows: list[int]) -> None:
    model = ours(random_model(CONFIGS[next(iter(CONFIGS))]), "float32")
    cache = model.new_cache(1, LENGTH)
    with pytest.raises(ValueError, match=r"logit_rows \[.*\] are not all among the pass's tokens, 0 to 11"):
        model.forward(torch.arange(12), [Segment(0, 0, 12)], cache, logit_rows=rows)
    assert cache.lengths == [0]


@needs_instructions
def test_a_compiled_pass_names_the_most_likely_ids() -> None:
    model = ours(random_model(CONFIGS["llama"]), "int8")
    model._lm_head.packed[0, :, :] = model._lm_head.packed[1, :, :]  # each id of the first 32 has an equal
    output = model.forward(torch.arange(40) % 97, [Segment(0, 0, 40)], model.new_cache(1, LENGTH), (), range(40))
    assert output.logits_MV is not None
    assert output.best_M is not None
    assert output.best_M.tolist() == output.logits_MV.numpy().argmax(-1).tolist()
    assert output.logits_MV.shape[1] % 32, "columns of padding are no ids"


@needs_instructions
def test_a_softcap_leaves_the_most_likely_ids_to_others() -> None:
    name = next(name for name in CONFIGS if "softcap" in name)
    model = ours(random_model(CONFIGS[name]), "int8")
    output = model.forward(torch.arange(4), [Segment(0, 0, 4)], model.new_cache(1, LENGTH), (), [3])
    assert output.best_M is None


@needs_instructions
@pytest.mark.parametrize("wrong", [-1, 97])
def test_ids_outside_the_vocabulary_are_an_error_in_int8(wrong: int) -> None:
    model = ours(random_model(CONFIGS["llama"]), "int8")
    with pytest.raises(IndexError, match=r"outside the vocabulary 0\.\.96"):
        model.forward(torch.tensor([1, wrong]), [Segment(0, 0, 2)], model.new_cache(1, LENGTH))


@needs_instructions
def test_ids_of_another_integer_type_are_read_as_what_they_are() -> None:
    model = ours(random_model(CONFIGS["llama"]), "int8")
    ids = torch.tensor([3, 0, 2, 0])
    first, second = (model.forward(i, [Segment(0, 0, 4)], model.new_cache(1, LENGTH)) for i in (ids, ids.int()))
    torch.testing.assert_close(first.hidden_NH, second.hidden_NH, atol=0, rtol=0)

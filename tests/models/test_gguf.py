"""GGUF files, written here as llama.cpp's converter writes them, read back as Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.gguf_file import read_gguf
from dspark.models.loading import load_target
from dspark.types import Segment
from tests.models.test_parity import CONFIGS, random_model

ALPHABET = [*"abcdefghijklmnopqrstuvwxyz0123456789ĠĊ.,!?:"]


def interleave_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to Llama's query and key rows."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_llama(path: Path, *, split: str = "smollm", quantise: bool = False) -> dict[str, torch.Tensor]:
    model = random_model(CONFIGS["llama"])
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|end|>", *ALPHABET, "ab", "Ġa", "12"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "Ġ a", "1 2"])
    writer.add_eos_token_id(0)
    names = {
        "embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        noun = next(theirs for mine, theirs in names.items() if mine in name)
        prefix = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        array = tensor.numpy()
        if noun in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if noun == "attn_q" else config.num_key_value_heads
            array = interleave_rotary_halves(array, heads)
        if quantise and array.ndim == 2 and array.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{prefix}{noun}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{prefix}{noun}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_llama_round_trip_is_exact(tmp_path: Path) -> None:
    weights = write_llama(tmp_path / "tiny.gguf")
    loaded = read_gguf(tmp_path / "tiny.gguf")
    assert loaded.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded.weights[name], tensor, atol=0, rtol=0)
    reference = DecoderConfig.from_huggingface(CONFIGS["llama"].to_dict())
    assert DecoderConfig.from_huggingface(loaded.config) == reference


def test_quantised_file_runs_near_the_original(tmp_path: Path) -> None:
    weights = write_llama(tmp_path / "tiny.gguf", quantise=True)
    target = load_target(str(tmp_path / "tiny.gguf"))
    assert target.stop_token_ids == {0}
    original = Decoder(target.model.config, weights)
    text = torch.randint(0, 97, (16,))
    outputs = [m.forward(text, [Segment(0, 0, 16)], m.new_cache(1, 16)).hidden_NH for m in (target.model, original)]
    assert (outputs[0] - outputs[1]).abs().mean() < 0.05 * outputs[1].abs().mean()
    assert not torch.equal(*outputs)


def test_tokenizer_splits_as_the_file_says(tmp_path: Path) -> None:
    write_llama(tmp_path / "digits.gguf", split="smollm")
    write_llama(tmp_path / "words.gguf", split="gpt-2")
    digits = read_gguf(tmp_path / "digits.gguf").tokenizer
    words = read_gguf(tmp_path / "words.gguf").tokenizer
    assert digits.convert_ids_to_tokens(digits("ab a12<|end|>")["input_ids"]) == ["ab", "Ġa", "1", "2", "<|end|>"]
    assert words.convert_ids_to_tokens(words("ab 12")["input_ids"])[-1] == "12"
    assert digits.decode(digits("ab a12!")["input_ids"]) == "ab a12!"


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "odd.gguf", split="deepseek-v3")
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'deepseek-v3'"):
        read_gguf(tmp_path / "odd.gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="rwkv7"):
        read_gguf(tmp_path / "other.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"not a gguf file at all, only text")
    with pytest.raises(ValueError, match="not a readable GGUF"):
        read_gguf(tmp_path / "broken.gguf")


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    name = f"tokenizer.ggml.{key}".encode()
    assert content.count(name) == 1
    (tmp_path / "tiny.gguf").write_bytes(content.replace(name, name[:-1] + b"?"))
    with pytest.raises(ValueError, match=f"tokenizer.ggml.{key} is missing"):
        read_gguf(tmp_path / "tiny.gguf")

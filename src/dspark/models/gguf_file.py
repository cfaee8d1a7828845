"""Read a GGUF file as a Hugging Face checkpoint: config, tensors under their Hugging Face names, tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from dspark.models.gguf_tokenizer import tokenizer_from_gguf

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class GGUFModel:
    """A GGUF file in Hugging Face terms; ``weights`` are float32."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerFast


def read_gguf(path: Path) -> GGUFModel:
    """Load and dequantise ``path``.

    Raises:
        ValueError: naming the key or tensor, if the file is damaged, its architecture is not native here, or a
            setting in it is not supported.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
    try:
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is damaged: its metadata cannot be read ({error})") from error
    config = _read_config(metadata, path)
    has_head = any(tensor.name == "output.weight" for tensor in reader.tensors)
    config["tie_word_embeddings"] = not has_head
    weights = {}
    for tensor in reader.tensors:
        name = _tensor_name(tensor.name, config["model_type"], path)
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[name] = _undo_conversion(torch.from_numpy(np.array(array, dtype=np.float32)), name, config)
    tokenizer = tokenizer_from_gguf(metadata, path)
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = metadata.get("tokenizer.ggml.eos_token_id")
    return GGUFModel(config=config, weights=weights, tokenizer=tokenizer)


def _read_config(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ValueError(f"{path}: general.architecture {architecture!r} is not one of {sorted(_MODEL_TYPES)}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{path}: the key {architecture}.{key} is missing")
        return value

    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise ValueError(
            f"{path}: {architecture}.rope.scaling.type is not supported in GGUF; use the Hugging Face checkpoint"
        )
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(f"{path}: the key tokenizer.ggml.tokens is missing")
    heads = get("attention.head_count")
    head_dim = metadata.get(f"{architecture}.attention.key_length", get("embedding_length") // heads)
    if metadata.get(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path}: {architecture}.rope.dimension_count differs from the head size: not supported")
    config = {
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        # Stored as float32: 1e-5 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
    }
    if architecture == "gemma3":
        config["hidden_activation"] = "gelu_pytorch_tanh"
        config["sliding_window"] = get("attention.sliding_window")
        config["query_pre_attn_scalar"] = head_dim
    else:
        config["hidden_act"] = "silu"
    return config


def _tensor_name(name: str, model_type: str, path: Path) -> str:
    names = {**_TENSOR_NAMES, **(_GEMMA_NAMES if model_type == "gemma3_text" else {})}
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        remedy = "; scaled rotary frequencies need the Hugging Face checkpoint" if name.startswith("rope_freqs") else ""
        raise ValueError(f"{path}: tensor {name} is not known for {model_type}{remedy}")
    layer, noun, kind = match.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{names[noun]}.{kind}"


def _undo_conversion(tensor: torch.Tensor, name: str, config: dict[str, Any]) -> torch.Tensor:
    """Invert what llama.cpp's converter does to the tensors of a family."""
    undo: Callable[[torch.Tensor], torch.Tensor] | None = None
    if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        # The converter interleaves the two rotary halves of each head.
        undo = lambda t: t.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # noqa: E731
    elif config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
        undo = lambda t: t - 1.0  # noqa: E731
    return tensor if undo is None else undo(tensor).contiguous()

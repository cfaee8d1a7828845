"""Tiny random models of many families, made by transformers from configs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

WINDOW = 6
VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 2.0,
}
_SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "phi": {"num_key_value_heads": 4},
    "olmo2": {},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gemma4_text": _GEMMA4,
    "gemma4-shared-kv": {**_GEMMA4, "model_type": "gemma4_text", "num_kv_shared_layers": 2},
    "gemma4-experts": {
        **_GEMMA4,
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.3},
    "cohere": {"logit_scale": 0.25},
    "minicpm3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1, 0],
    },
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
FAMILIES = tuple(_SIZES)


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    settings = {**_COMMON, **_SIZES.get(family, {}), **changes}
    return CONFIG_MAPPING[settings.pop("model_type", family)](**settings)


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose biases, norms and scales all matter: none is left at zero or one."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model

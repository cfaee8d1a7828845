"""One decoder over several model families: their differences, written as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.models.rope import RopeSettings

_SCALED_ROPES = ("linear", "llama3", "yarn")
# Keys that configs carry beside those of their class and that change nothing here, or are turned into others there.
_NEUTRAL_KEYS = frozenset(
    {
        "attn_implementation", "auto_map", "cache_implementation", "head_dim", "is_llama_config", "model_max_length",
        "name_or_path", "rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern",
        "tokenizer_class", "torch_dtype", "transformers.js_config", "unsloth_fixed", "unsloth_version",
    }
)  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and variant of a decoder-only transformer.

    Attributes:
        sliding_layers: for each layer, whether it attends to the last ``sliding_window`` positions only.
        rope: rotation of full-attention layers; ``sliding_rope`` of sliding ones (equal unless the family differs).
        qk_norm: RMSNorm on every query and key head.
        norm_adds_one: norms scale by ``1 + weight`` (Gemma).
        sandwich_norms: a norm also after attention and after the MLP (Gemma).
        query_scale: factor on query-key products.
        embedding_scale: factor on input embeddings.
        final_softcap: ``cap * tanh(logits / cap)``; None for none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeSettings
    rope_theta: float
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_adds_one: bool = False
    sandwich_norms: bool = False
    query_scale: float = 1.0
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope: RopeSettings | None = None

    @staticmethod
    def from_huggingface(raw: Mapping[str, Any]) -> DecoderConfig:
        """Read the contents of a ``config.json``.

        Raises:
            ValueError: naming the field, if the family or one of its settings is not supported.
        """
        model_type = raw.get("model_type")
        if model_type not in _FAMILIES:
            raise ValueError(
                f"config.json: model_type {model_type!r} is not one of the native families {sorted(_FAMILIES)}"
            )
        for field in ("quantization_config", "per_layer_config"):
            if raw.get(field):
                raise ValueError(f"config.json: {field} is not supported; use an unquantised checkpoint")
        hf = AutoConfig.for_model(**{**raw, "model_type": model_type})
        _refuse_unknown(raw, type(hf)().to_dict())
        variant = _FAMILIES[model_type](hf)
        activation = getattr(hf, "hidden_act", None) or getattr(hf, "hidden_activation", None)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"config.json: hidden_act {activation!r} is not supported (one of {sorted(_ACTIVATIONS)})")
        if hf.num_attention_heads % hf.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads ({hf.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({hf.num_key_value_heads})"
            )
        layer_types = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != hf.num_hidden_layers:
            raise ValueError(f"config.json: layer_types has {sorted(unknown) or 'the wrong length'}, not supported")
        sliding_layers = tuple(kind == "sliding_attention" for kind in layer_types)
        window = hf.sliding_window if any(sliding_layers) else None
        if any(sliding_layers) and not window:
            raise ValueError("config.json: layer_types asks for sliding_attention but sliding_window is not set")
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        rope, sliding_rope, theta = _read_rope(hf, head_dim)
        return DecoderConfig(
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            norm_eps=hf.rms_norm_eps,
            max_position_embeddings=hf.max_position_embeddings,
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            rope=rope,
            sliding_rope=sliding_rope,
            rope_theta=theta,
            activation=_ACTIVATIONS[activation],
            sliding_window=window,
            sliding_layers=sliding_layers,
            **{"query_scale": head_dim**-0.5, **variant},
        )


def _refuse_unknown(raw: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse a setting that the family's config class does not have; one that is switched off needs no support."""
    for key, value in raw.items():
        if key not in known and key not in _NEUTRAL_KEYS and not key.startswith("_") and value not in (None, False):
            raise ValueError(
                f"config.json: {key} ({value!r}) is not a setting of {raw['model_type']} that is supported; "
                "remove it if it has no effect"
            )


def _llama(hf: Any) -> dict[str, Any]:
    if getattr(hf, "pretraining_tp", 1) not in (None, 1):
        raise ValueError("config.json: pretraining_tp other than 1 is not supported")
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


def _qwen2(hf: Any) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(hf: Any) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias, "qk_norm": True}


def _gemma3(hf: Any) -> dict[str, Any]:
    if hf.attn_logit_softcapping is not None:
        raise ValueError("config.json: attn_logit_softcapping is not supported")
    if hf.use_bidirectional_attention:
        raise ValueError("config.json: use_bidirectional_attention is not supported")
    return {
        "qkv_bias": hf.attention_bias,
        "output_bias": hf.attention_bias,
        "qk_norm": True,
        "norm_adds_one": True,
        "sandwich_norms": True,
        "query_scale": hf.query_pre_attn_scalar**-0.5,
        "embedding_scale": hf.hidden_size**0.5,
        "final_softcap": hf.final_logit_softcapping,
    }


_FAMILIES = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3_text": _gemma3}


def _read_rope(hf: Any, head_dim: int) -> tuple[RopeSettings, RopeSettings | None, float]:
    """Rotation of full and of sliding layers, and the base of the former."""
    parameters = hf.rope_parameters
    if parameters is None:
        raise ValueError("config.json: rope_parameters (or rope_theta) is missing")
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full = _rope_of(hf, parameters["full_attention"], head_dim, "full_attention")
        sliding = _rope_of(hf, parameters["sliding_attention"], head_dim, "sliding_attention")
        return full, sliding, float(parameters["full_attention"]["rope_theta"])
    return _rope_of(hf, parameters, head_dim, None), None, float(parameters["rope_theta"])


def _rope_of(hf: Any, parameters: Mapping[str, Any], head_dim: int, layer_type: str | None) -> RopeSettings:
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("config.json: rope_parameters.partial_rotary_factor is not supported")
    if kind == "default":
        return RopeSettings.default(head_dim, parameters["rope_theta"])
    if kind not in _SCALED_ROPES:
        raise ValueError(
            f"config.json: rope_type {kind!r} is not supported (one of {['default', *_SCALED_ROPES]}); its frequencies "
            "change with the length of the text"
        )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, layer_type=layer_type)
    return RopeSettings(inverse_frequencies=tuple(frequencies.tolist()), attention_scaling=float(scaling))

"""What the configurations of all drafter kinds have in common: fields, their checks, and the strict reader."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Protocol


class DrafterConfig(Protocol):
    """Fields that every drafter's configuration has, under the names of the published ``config.json``.

    Attributes:
        vocab_size: Vocabulary V of the target.
        draft_vocab_size: Columns D of the draft distribution, at most `vocab_size`.
        hidden_size: Width H, the target's.
        num_hidden_layers: Draft layers.
        num_target_layers: Layers of the target that the drafter belongs to.
        target_layer_ids: Target layers whose outputs are the features, concatenated in this order.
        block_size: Draft tokens of one round, gamma.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_target_layers(self) -> int: ...
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def has_reduced_vocabulary(self) -> bool: ...

    def to_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """The published ``config.json``, for tensors stored as `dtype`."""
        ...


# Keys that transformers and training code write into every config and that change nothing here, whatever they say.
_NEUTRAL_KEYS = frozenset(
    {
        "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_window_layers", "model_type",
        "name_or_path", "pad_token_id", "target_model_name_or_path", "torch_dtype", "transformers_version",
        "use_cache", "attn_implementation",
    }
)  # fmt: skip

_COMMON_KEYS = frozenset(
    {
        "draft_vocab_size", "head_dim", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "num_target_layers", "rms_norm_eps", "rope_parameters", "rope_theta", "sliding_window", "target_hidden_size",
        "target_layer_ids", "tie_word_embeddings", "vocab_size",
    }
)  # fmt: skip

# Keys that must have one of these values, where they are present.
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
}


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_common_fields(config: DrafterConfig) -> None:
    """Check what holds for every kind; the features' layers may be any of the target's.

    Raises:
        ValueError: naming the field.
    """
    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "num_target_layers", "draft_vocab_size",
    ):  # fmt: skip
        require_positive(config, field)
    require(config.head_dim % 2 == 0, f"head_dim must be even for rotary positions, got {config.head_dim}")
    require(
        config.num_attention_heads % config.num_key_value_heads == 0,
        f"num_attention_heads ({config.num_attention_heads}) must be a multiple of "
        f"num_key_value_heads ({config.num_key_value_heads})",
    )
    require(
        config.draft_vocab_size <= config.vocab_size,
        f"draft_vocab_size ({config.draft_vocab_size}) must not exceed vocab_size ({config.vocab_size})",
    )
    for field in ("rms_norm_eps", "rope_theta"):
        value = getattr(config, field)
        require(0 < value < math.inf, f"{field} must be a positive number, got {value}")
    layers = config.target_layer_ids
    require(len(layers) > 0, "target_layer_ids is empty; name at least one target layer")
    require(len(set(layers)) == len(layers), f"target_layer_ids {list(layers)} names a layer twice")
    for layer in layers:
        require(
            0 <= layer < config.num_target_layers,
            f"target_layer_ids contains {layer}, but the target has layers 0 to {config.num_target_layers - 1}",
        )


def require_positive(config: DrafterConfig, field: str) -> None:
    """Raise ValueError unless the integer called `field` is at least 1."""
    value = getattr(config, field)
    require(value >= 1, f"{field} must be at least 1, got {value}")


def refuse_final_layer(config: DrafterConfig) -> None:
    """Raise ValueError if the target's final layer is a feature."""
    final = config.num_target_layers - 1
    require(
        final not in config.target_layer_ids,
        f"target_layer_ids contains {final}, the target's final layer, which cannot be a context feature; "
        f"use layers 0 to {final - 1}",
    )


def common_content(config: DrafterConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The part of ``config.json`` that every kind writes: a Qwen3-style body and the target's sizes."""
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def common_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments, but for the number of layers, that every kind reads in the same way.

    Raises:
        ValueError: naming the field that is missing or of the wrong type.
    """
    hidden_size = integer(values, "hidden_size")
    num_heads = integer(values, "num_attention_heads")
    require(num_heads >= 1, f"num_attention_heads must be at least 1, got {num_heads}")
    vocab_size = integer(values, "vocab_size")
    return {
        "vocab_size": vocab_size,
        "draft_vocab_size": integer(values, "draft_vocab_size", default=vocab_size),
        "hidden_size": hidden_size,
        "intermediate_size": integer(values, "intermediate_size"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": integer(values, "num_key_value_heads", default=num_heads),
        "head_dim": integer(values, "head_dim", default=hidden_size // num_heads),
        "max_position_embeddings": integer(values, "max_position_embeddings"),
        "num_target_layers": integer(values, "num_target_layers"),
        "target_layer_ids": _layer_ids(values),
        "rms_norm_eps": number(values, "rms_norm_eps", default=1e-6),
        "rope_theta": _rope_theta(values),
        "initializer_range": number(values, "initializer_range", default=0.02),
    }


def refuse_unsupported(
    values: Mapping[str, Any],
    *,
    own_keys: Set[str],
    fixed_values: Mapping[str, tuple[Any, ...]],
    may_say_tied: bool = False,
) -> None:
    """Refuse every key that is not known, and every value of a known one that nothing here can honour.

    Args:
        values: The content of ``config.json``.
        own_keys: Keys of the kind besides the common ones.
        fixed_values: Keys of the kind that must have one of these values where they are present.
        may_say_tied: Whether ``tie_word_embeddings`` may be true, as in forms that store neither of the two.

    Raises:
        ValueError: naming the key.
    """
    fixed = {**_FIXED_VALUES, **fixed_values}
    for key, allowed in fixed.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"{key} {values[key]!r} is not supported; it must be {allowed[0]!r}")
    model_type = values.get("model_type", "qwen3")
    require(model_type == "qwen3", f"model_type {model_type!r} is not supported; it must be 'qwen3'")
    require(
        may_say_tied or not values.get("tie_word_embeddings"),
        "tie_word_embeddings must be false: embedding and LM head are the target's",
    )
    # Configs without sliding window often keep the window's size.
    window = values.get("sliding_window")
    require(
        window is None or values.get("use_sliding_window") is False,
        f"sliding_window {window!r} is not supported; it must be null",
    )
    target_hidden_size = values.get("target_hidden_size")
    require(
        target_hidden_size in (None, values.get("hidden_size")),
        f"target_hidden_size {target_hidden_size!r} is not supported; it must equal hidden_size",
    )
    layer_types = values.get("layer_types") or []
    require(isinstance(layer_types, list), f"layer_types must be a list, got {layer_types!r}")
    for layer_type in layer_types:
        require(
            layer_type == "full_attention", f"layer_types contains {layer_type!r}; only 'full_attention' is supported"
        )
    known = _COMMON_KEYS | _NEUTRAL_KEYS | fixed.keys() | own_keys
    for key, value in values.items():
        # A feature that is switched off needs no support.
        if key not in known and not key.startswith("_") and value is not None and value is not False:
            raise ValueError(f"{key} ({value!r}) is not a known setting of a drafter; remove it if it has no effect")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a drafter's ``config.json``.

    Raises:
        ValueError: naming the file, if there is none or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a drafter directory holds config.json and model.safetensors") from None
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold one JSON object")
    return content


def architecture_of(content: Mapping[str, Any]) -> str:
    """The one name under ``architectures``.

    Raises:
        ValueError: if it does not name exactly one.
    """
    names = content.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"architectures must name one architecture, got {names!r}")
    return str(names[0])


def integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The integer at `key`; ValueError for anything else, and if it is missing without a default."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, got {value!r}")
    return value


def boolean(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """The truth value at `key`, `default` where it is missing or null; ValueError for anything else."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    """The number at `key`, `default` where it is missing or null; ValueError for anything else."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _layer_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    layers = values.get("target_layer_ids")
    if not isinstance(layers, list) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in layers
    ):
        raise ValueError(f"target_layer_ids must be a list of integers, got {layers!r}")
    return tuple(layers)


def _rope_theta(values: Mapping[str, Any]) -> float:
    parameters = values.get("rope_parameters")
    if parameters is None:
        if values.get("rope_theta") is None:
            raise ValueError("rope_parameters is missing (and so is rope_theta)")
        return number(values, "rope_theta", default=0.0)
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {parameters!r}")
    rope_type = parameters.get("rope_type", "default")
    require(rope_type == "default", f"rope_parameters.rope_type {rope_type!r} is not supported; it must be 'default'")
    extra = sorted(set(parameters) - {"rope_theta", "rope_type", "partial_rotary_factor"})
    require(not extra, f"rope_parameters.{extra[0] if extra else ''} is not supported with rope_type 'default'")
    partial = parameters.get("partial_rotary_factor", 1.0)
    require(partial == 1.0, f"rope_parameters.partial_rotary_factor {partial!r} is not supported; it must be 1.0")
    if parameters.get("rope_theta") is None:
        raise ValueError("rope_parameters.rope_theta is missing")
    return number(parameters, "rope_theta", default=0.0)

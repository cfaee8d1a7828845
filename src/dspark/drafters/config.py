"""Configuration of a DSpark drafter and its form on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3DSparkModel"
NESTED_ARCHITECTURES = ("DFlashDraftModel", "DSparkDraftModel")
HEAD_TYPES = ("vanilla", "gated", "rnn")

# Keys that transformers writes into every config and that change nothing here, whatever they say.
_NEUTRAL_KEYS = frozenset(
    {
        "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_window_layers", "model_type",
        "name_or_path", "pad_token_id", "torch_dtype", "transformers_version", "use_cache", "attn_implementation",
    }
)  # fmt: skip

# Keys that must have one of these values, where they are present.
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "attention_mode": ("gqa", "mha", None),
    "causal": (False, None),
    "hidden_act": ("silu",),
    "is_causal": (False, None),
    "projector_type": ("dspark", "dflash", None),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
}

_OWN_KEYS = frozenset(
    {
        "block_size", "confidence_head_with_markov", "dflash_config", "draft_vocab_size", "enable_confidence_head",
        "head_dim", "hidden_size", "initializer_range", "intermediate_size", "layer_types", "markov_head_type",
        "markov_rank", "mask_token_id", "max_position_embeddings", "num_anchors", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "num_target_layers", "rms_norm_eps", "rope_parameters",
        "rope_theta", "sample_from_anchor", "sliding_window", "target_hidden_size", "target_layer_ids",
        "tie_word_embeddings", "vocab_size",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Sizes and switches of a drafter; the field names are those of the published ``config.json``.

    Attributes:
        vocab_size: Vocabulary V of the target.
        draft_vocab_size: Columns D of the draft distribution, at most `vocab_size`.
        hidden_size: Width H, the target's.
        num_hidden_layers: Draft layers.
        num_target_layers: Layers of the target that the drafter belongs to.
        target_layer_ids: Target layers whose outputs are the context features, concatenated in this order; never the
            final one.
        block_size: Draft tokens of one round, gamma, in both block layouts.
        mask_token_id: Target token whose embedding stands for "to be predicted".
        sample_from_anchor: True: gamma inputs (anchor, then gamma - 1 masks), the slot of the anchor predicts the
            first draft token.
            False: 1 + gamma inputs, the masks sit on the predicted positions.
        markov_rank: Rank r of the sequential head; 0 for none (DFlash).
        markov_head_type: ``vanilla``, ``gated`` or ``rnn``; None exactly when `markov_rank` is 0.
        enable_confidence_head: Whether there is a confidence head.
        confidence_head_with_markov: Whether it also sees the previous token's embedding.
        num_anchors: Anchors sampled per training sequence.

    Raises:
        ValueError: naming the field, for values that contradict each other or that nothing here can honour.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    num_anchors: int = 512
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "num_target_layers", "block_size",
            "draft_vocab_size", "num_anchors",
        ):  # fmt: skip
            _require(getattr(self, field) >= 1, f"{field} must be at least 1, got {getattr(self, field)}")
        _require(self.head_dim % 2 == 0, f"head_dim must be even for rotary positions, got {self.head_dim}")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({self.num_key_value_heads})",
        )
        _require(
            self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size ({self.draft_vocab_size}) must not exceed vocab_size ({self.vocab_size})",
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens; "
            "use an existing, unused token",
        )
        _require(len(self.target_layer_ids) > 0, "target_layer_ids is empty; name at least one target layer")
        _require(
            len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            f"target_layer_ids {list(self.target_layer_ids)} names a layer twice",
        )
        for layer in self.target_layer_ids:
            _require(
                layer != self.num_target_layers - 1,
                f"target_layer_ids contains {layer}, the target's final layer, which cannot be a context feature; "
                f"use layers 0 to {self.num_target_layers - 2}",
            )
            _require(
                0 <= layer < self.num_target_layers,
                f"target_layer_ids contains {layer}, but the target has layers 0 to {self.num_target_layers - 1}",
            )
        _require(self.markov_rank >= 0, f"markov_rank must not be negative, got {self.markov_rank}")
        if self.markov_rank > 0:
            _require(
                self.markov_head_type is not None,
                f"markov_head_type is missing although markov_rank is {self.markov_rank}; "
                f"give one of {', '.join(HEAD_TYPES)}",
            )
            _require(
                self.markov_head_type in HEAD_TYPES,
                f"markov_head_type {self.markov_head_type!r} is not known; it must be one of {', '.join(HEAD_TYPES)}",
            )
        else:
            _require(
                self.markov_head_type is None,
                f"markov_head_type {self.markov_head_type!r} needs markov_rank > 0; "
                "leave it out for a drafter without sequential head",
            )
        if self.confidence_head_with_markov:
            _require(self.enable_confidence_head, "confidence_head_with_markov needs enable_confidence_head")
            _require(self.markov_rank > 0, "confidence_head_with_markov needs markov_rank > 0")

    @property
    def num_block_inputs(self) -> int:
        """Slots that the backbone sees per block: gamma, or 1 + gamma when the anchor's slot predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether the drafter proposes only a subset of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def to_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """The published ``config.json`` (form A), for tensors stored as `dtype`."""
        content: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": dtype,
            "enable_confidence_head": self.enable_confidence_head,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "markov_rank": self.markov_rank,
            "mask_token_id": self.mask_token_id,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "qwen3",
            "num_anchors": self.num_anchors,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "sample_from_anchor": self.sample_from_anchor,
            "sliding_window": None,
            "target_layer_ids": list(self.target_layer_ids),
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }
        if self.markov_rank > 0:
            content["markov_head_type"] = self.markov_head_type
        if self.enable_confidence_head:
            content["confidence_head_with_markov"] = self.confidence_head_with_markov
        return dict(sorted(content.items()))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DSparkConfig:
        """Read form A, or the nested form B (values under ``dflash_config``).

        Where `sample_from_anchor` is missing, form A and ``DSparkDraftModel`` mean true; ``DFlashDraftModel`` means
        the original DFlash layout, false. ``DFlashDraftModel`` counts the anchor's slot in `block_size` when it
        predicts nothing; here `block_size` is gamma.

        Raises:
            ValueError: naming the field that is missing, unknown, or asks for something not implemented.
        """
        architecture = _architecture(content)
        nested = architecture in NESTED_ARCHITECTURES
        values = _merge_nested(content) if nested else dict(content)
        _refuse_unsupported(values, nested=nested)

        sample_from_anchor = values.get("sample_from_anchor")
        if sample_from_anchor is None:
            sample_from_anchor = architecture != "DFlashDraftModel"
        block_size = _integer(values, "block_size")
        if architecture == "DFlashDraftModel" and not sample_from_anchor:
            block_size -= 1
        rank = _integer(values, "markov_rank", default=0)
        has_confidence = bool(values.get("enable_confidence_head") or False)
        hidden_size = _integer(values, "hidden_size")
        num_heads = _integer(values, "num_attention_heads")
        vocab_size = _integer(values, "vocab_size")
        return cls(
            vocab_size=vocab_size,
            draft_vocab_size=_integer(values, "draft_vocab_size", default=vocab_size),
            hidden_size=hidden_size,
            intermediate_size=_integer(values, "intermediate_size"),
            num_hidden_layers=_integer(values, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=_integer(values, "num_key_value_heads", default=num_heads),
            head_dim=_integer(values, "head_dim", default=hidden_size // num_heads),
            max_position_embeddings=_integer(values, "max_position_embeddings"),
            num_target_layers=_integer(values, "num_target_layers"),
            target_layer_ids=_layer_ids(values),
            block_size=block_size,
            mask_token_id=_integer(values, "mask_token_id"),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(values),
            sample_from_anchor=bool(sample_from_anchor),
            markov_rank=rank,
            markov_head_type=values.get("markov_head_type") if rank > 0 else None,
            enable_confidence_head=has_confidence,
            confidence_head_with_markov=has_confidence and bool(values.get("confidence_head_with_markov", rank > 0)),
            num_anchors=_integer(values, "num_anchors", default=512),
            initializer_range=float(values.get("initializer_range", 0.02)),
        )

    @classmethod
    def from_file(cls, path: Path) -> DSparkConfig:
        """Read ``config.json``; errors name the file as well as the field."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{path}: no such file; a drafter directory holds config.json and model.safetensors"
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}: must hold one JSON object")
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _architecture(content: Mapping[str, Any]) -> str:
    names = content.get("architectures")
    _require(isinstance(names, list) and len(names) == 1, f"architectures must name one architecture, got {names!r}")
    assert isinstance(names, list)
    architecture = str(names[0])
    supported = (ARCHITECTURE, *NESTED_ARCHITECTURES)
    _require(
        architecture in supported,
        f"architectures {architecture!r} is not supported; it must be one of {', '.join(supported)}",
    )
    return architecture


def _merge_nested(content: Mapping[str, Any]) -> dict[str, Any]:
    nested = content.get("dflash_config")
    _require(
        isinstance(nested, Mapping), "dflash_config is missing; this architecture keeps its drafter settings there"
    )
    assert isinstance(nested, Mapping)
    values = {key: value for key, value in content.items() if key != "dflash_config"}
    for key, value in nested.items():
        if key in values and values[key] != value:
            raise ValueError(f"{key} is {values[key]!r} at the top and {value!r} under dflash_config; make them agree")
        values[key] = value
    return values


def _refuse_unsupported(values: Mapping[str, Any], *, nested: bool) -> None:
    for key, allowed in _FIXED_VALUES.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"{key} {values[key]!r} is not supported; it must be {allowed[0]!r}")
    model_type = values.get("model_type", "qwen3")
    _require(model_type == "qwen3", f"model_type {model_type!r} is not supported; it must be 'qwen3'")
    _require(
        nested or not values.get("tie_word_embeddings"),
        "tie_word_embeddings must be false: embedding and LM head are the target's",
    )
    # Configs without sliding window often keep the window's size.
    window = values.get("sliding_window")
    _require(
        window is None or values.get("use_sliding_window") is False,
        f"sliding_window {window!r} is not supported; it must be null",
    )
    target_hidden_size = values.get("target_hidden_size")
    _require(
        target_hidden_size in (None, values.get("hidden_size")),
        f"target_hidden_size {target_hidden_size!r} is not supported; it must equal hidden_size",
    )
    layer_types = values.get("layer_types") or []
    for layer_type in layer_types:
        _require(
            layer_type == "full_attention", f"layer_types contains {layer_type!r}; only 'full_attention' is supported"
        )
    known = _OWN_KEYS | _NEUTRAL_KEYS | _FIXED_VALUES.keys()
    for key, value in values.items():
        # A feature that is switched off needs no support.
        if key not in known and not key.startswith("_") and value is not None and value is not False:
            raise ValueError(f"{key} ({value!r}) is not a known setting of a drafter; remove it if it has no effect")


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, got {value!r}")
    return value


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
        if "rope_theta" not in values:
            raise ValueError("rope_parameters is missing (and so is rope_theta)")
        return float(values["rope_theta"])
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {parameters!r}")
    rope_type = parameters.get("rope_type", "default")
    _require(rope_type == "default", f"rope_parameters.rope_type {rope_type!r} is not supported; it must be 'default'")
    extra = sorted(set(parameters) - {"rope_theta", "rope_type", "partial_rotary_factor"})
    _require(not extra, f"rope_parameters.{extra[0] if extra else ''} is not supported with rope_type 'default'")
    partial = parameters.get("partial_rotary_factor", 1.0)
    _require(partial == 1.0, f"rope_parameters.partial_rotary_factor {partial!r} is not supported; it must be 1.0")
    if "rope_theta" not in parameters:
        raise ValueError("rope_parameters.rope_theta is missing")
    return float(parameters["rope_theta"])

"""Configuration of a DSpark (or DFlash) drafter and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.drafters.config import (
    architecture_of,
    boolean,
    check_common_fields,
    common_content,
    common_fields,
    integer,
    refuse_final_layer,
    refuse_unsupported,
    require,
    require_positive,
)

ARCHITECTURE = "Qwen3DSparkModel"
NESTED_ARCHITECTURES = ("DFlashDraftModel", "DSparkDraftModel")
HEAD_TYPES = ("vanilla", "gated", "rnn")

_OWN_KEYS = frozenset(
    {
        "block_size", "confidence_head_with_markov", "dflash_config", "enable_confidence_head", "markov_head_type",
        "markov_rank", "mask_token_id", "num_anchors", "sample_from_anchor",
    }
)  # fmt: skip
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha", None),
    "causal": (False, None),
    "is_causal": (False, None),
    "projector_type": ("dspark", "dflash", None),
}


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
        check_common_fields(self)
        refuse_final_layer(self)
        require_positive(self, "block_size")
        require_positive(self, "num_anchors")
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens; "
            "use an existing, unused token",
        )
        require(self.markov_rank >= 0, f"markov_rank must not be negative, got {self.markov_rank}")
        if self.markov_rank > 0:
            require(
                self.markov_head_type is not None,
                f"markov_head_type is missing although markov_rank is {self.markov_rank}; "
                f"give one of {', '.join(HEAD_TYPES)}",
            )
            require(
                self.markov_head_type in HEAD_TYPES,
                f"markov_head_type {self.markov_head_type!r} is not known; it must be one of {', '.join(HEAD_TYPES)}",
            )
        else:
            require(
                self.markov_head_type is None,
                f"markov_head_type {self.markov_head_type!r} needs markov_rank > 0; "
                "leave it out for a drafter without sequential head",
            )
        if self.confidence_head_with_markov:
            require(self.enable_confidence_head, "confidence_head_with_markov needs enable_confidence_head")
            require(self.markov_rank > 0, "confidence_head_with_markov needs markov_rank > 0")

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
        content = common_content(self, ARCHITECTURE, dtype) | {
            "block_size": self.block_size,
            "enable_confidence_head": self.enable_confidence_head,
            "markov_rank": self.markov_rank,
            "mask_token_id": self.mask_token_id,
            "num_anchors": self.num_anchors,
            "sample_from_anchor": self.sample_from_anchor,
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
        architecture = architecture_of(content)
        supported = (ARCHITECTURE, *NESTED_ARCHITECTURES)
        require(
            architecture in supported,
            f"architectures {architecture!r} is not a DSpark drafter; it must be one of {', '.join(supported)}",
        )
        nested = architecture in NESTED_ARCHITECTURES
        values = _merge_nested(content) if nested else dict(content)
        refuse_unsupported(values, own_keys=_OWN_KEYS, fixed_values=_FIXED_VALUES, may_say_tied=nested)

        sample_from_anchor = boolean(values, "sample_from_anchor", default=architecture != "DFlashDraftModel")
        block_size = integer(values, "block_size")
        if architecture == "DFlashDraftModel" and not sample_from_anchor:
            block_size -= 1
        rank = integer(values, "markov_rank", default=0)
        has_confidence = boolean(values, "enable_confidence_head", default=False)
        return cls(
            **common_fields(values),
            num_hidden_layers=integer(values, "num_hidden_layers"),
            block_size=block_size,
            mask_token_id=integer(values, "mask_token_id"),
            sample_from_anchor=sample_from_anchor,
            markov_rank=rank,
            markov_head_type=values.get("markov_head_type") if rank > 0 else None,
            enable_confidence_head=has_confidence,
            confidence_head_with_markov=has_confidence
            and boolean(values, "confidence_head_with_markov", default=rank > 0),
            num_anchors=integer(values, "num_anchors", default=512),
        )


def _merge_nested(content: Mapping[str, Any]) -> dict[str, Any]:
    nested = content.get("dflash_config")
    require(isinstance(nested, Mapping), "dflash_config is missing; this architecture keeps its drafter settings there")
    assert isinstance(nested, Mapping)
    values = {key: value for key, value in content.items() if key != "dflash_config"}
    for key, value in nested.items():
        if key in values and values[key] != value:
            raise ValueError(f"{key} is {values[key]!r} at the top and {value!r} under dflash_config; make them agree")
        values[key] = value
    return values

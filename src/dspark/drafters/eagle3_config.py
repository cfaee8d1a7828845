"""Configuration of an Eagle3 drafter and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.drafters.config import (
    architecture_of,
    check_common_fields,
    common_content,
    common_fields,
    integer,
    number,
    refuse_final_layer,
    refuse_unsupported,
    require,
    require_positive,
)

ARCHITECTURE = "Qwen3Eagle3Model"

_OWN_KEYS = frozenset({"step_loss_decay", "ttt_length"})
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {"draft_num_hidden_layers": (1, None), "num_hidden_layers": (1,)}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes of an Eagle3 drafter; the field names are those of the published ``config.json``.

    Attributes:
        vocab_size: Vocabulary V of the target.
        draft_vocab_size: Columns D of the draft distribution, at most `vocab_size`.
        hidden_size: Width H, the target's.
        num_target_layers: Layers of the target that the drafter belongs to.
        target_layer_ids: Target layers whose outputs are fused into the features, concatenated in this order; never
            the final one.
        ttt_length: Steps that training runs on the drafter's own outputs (training-time test); also the draft tokens
            of one round.
        step_loss_decay: Factor on the training loss from one step to the next.

    Raises:
        ValueError: naming the field, for values that contradict each other or that nothing here can honour.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    ttt_length: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    step_loss_decay: float = 0.8
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_common_fields(self)
        refuse_final_layer(self)
        require_positive(self, "ttt_length")
        require(0 < self.step_loss_decay <= 1, f"step_loss_decay must be above 0 and at most 1: {self.step_loss_decay}")

    @property
    def num_hidden_layers(self) -> int:
        """Draft layers: always one, so that context keys and values need no attention."""
        return 1

    @property
    def block_size(self) -> int:
        """Draft tokens of one round, gamma."""
        return self.ttt_length

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether the drafter proposes only a subset of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def to_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """The published ``config.json``, for tensors stored as `dtype`."""
        content = common_content(self, ARCHITECTURE, dtype) | {
            "draft_num_hidden_layers": 1,
            "step_loss_decay": self.step_loss_decay,
            "ttt_length": self.ttt_length,
        }
        return dict(sorted(content.items()))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Eagle3Config:
        """Read the published form.

        Raises:
            ValueError: naming the field that is missing, unknown, or asks for something not implemented.
        """
        architecture = architecture_of(content)
        require(
            architecture == ARCHITECTURE,
            f"architectures {architecture!r} is not an Eagle3 drafter; it must be {ARCHITECTURE}",
        )
        refuse_unsupported(content, own_keys=_OWN_KEYS, fixed_values=_FIXED_VALUES)
        return cls(
            **common_fields(content),
            ttt_length=integer(content, "ttt_length"),
            step_loss_decay=number(content, "step_loss_decay", default=0.8),
        )

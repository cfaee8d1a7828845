"""Configuration of an MTP-1 drafter and its form on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.drafters.config import (
    architecture_of,
    check_common_fields,
    common_content,
    common_fields,
    refuse_unsupported,
    require,
)

ARCHITECTURE = "Qwen3MTPModel"

_FIXED_VALUES: dict[str, tuple[Any, ...]] = {"block_size": (1, None), "num_hidden_layers": (1,)}


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Sizes of an MTP-1 drafter, named as in the published ``config.json`` of the other kinds.

    Attributes:
        vocab_size: Vocabulary V of the target.
        draft_vocab_size: Columns D of the draft distribution, at most `vocab_size`.
        hidden_size: Width H, the target's.
        num_target_layers: Layers of the target that the drafter belongs to.
        target_layer_ids: Always the target's final layer, alone.

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
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_common_fields(self)
        final = self.num_target_layers - 1
        require(
            self.target_layer_ids == (final,),
            f"target_layer_ids is {list(self.target_layer_ids)}, but MTP continues from the output of the target's "
            f"final layer alone; it must be [{final}]",
        )

    @property
    def num_hidden_layers(self) -> int:
        """Draft layers: always one, so that context keys and values need no attention."""
        return 1

    @property
    def block_size(self) -> int:
        """Draft tokens of one round: always one."""
        return 1

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether the drafter proposes only a subset of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def to_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """The ``config.json``, for tensors stored as `dtype`."""
        content = common_content(self, ARCHITECTURE, dtype) | {"block_size": 1}
        return dict(sorted(content.items()))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MtpConfig:
        """Read what `to_dict` writes.

        Raises:
            ValueError: naming the field that is missing, unknown, or asks for something not implemented.
        """
        architecture = architecture_of(content)
        require(
            architecture == ARCHITECTURE,
            f"architectures {architecture!r} is not an MTP drafter; it must be {ARCHITECTURE}",
        )
        refuse_unsupported(content, own_keys=frozenset(), fixed_values=_FIXED_VALUES)
        return cls(**common_fields(content))

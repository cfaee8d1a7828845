"""What the rest of the system may ask of a target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dspark.models.config import DecoderConfig
from dspark.models.kv_cache import KVCache
from dspark.types import Segment


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Hidden states of one forward pass over ``N`` flattened tokens.

    Attributes:
        hidden_NH: states after the final norm, the input of the LM head.
        taps_NT: outputs of the asked decoder layers side by side, ``T = len(tap_layers) * H``;
            None when no layer was asked for.
    """

    hidden_NH: torch.Tensor
    taps_NT: torch.Tensor | None


class Target(Protocol):
    """A frozen causal language model with a key/value cache in slots."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def fingerprint(self) -> str:
        """Hash that differs between checkpoints, whatever they are computed in."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the hidden states."""
        ...

    @property
    def embedding_weight_VH(self) -> torch.Tensor:
        """Token embeddings, before any input scaling."""
        ...

    @property
    def lm_head_weight_VH(self) -> torch.Tensor:
        """Output head in floating point, whatever the compute type."""
        ...

    def new_cache(self, num_slots: int, max_length: int) -> KVCache:
        """Allocate key/value memory for ``num_slots`` requests of up to ``max_length`` tokens each."""
        ...

    def forward(
        self, token_ids_N: torch.Tensor, segments: Sequence[Segment], cache: KVCache, tap_layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run ragged requests through the model, writing their keys and values into ``cache``."""
        ...

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """LM head on the asked rows only: ``[M, V]`` in float32."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings ``[..., H]`` as the model itself feeds them to its first layer."""
        ...

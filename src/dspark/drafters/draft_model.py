"""What all drafters are, whatever their layers: parts of the target, sizes, a place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.calibration.calibration import Calibration
from dspark.drafters.cache import DrafterCache
from dspark.drafters.config import DrafterConfig
from dspark.drafters.initialization import draft_token_ids, register_target_parts


class DraftModel(nn.Module):
    """Base of the drafters' modules.

    ``embed_tokens`` and ``lm_head`` are the target's and frozen (`register_target_parts`); with a reduced vocabulary
    ``d2t`` and ``t2d`` are its maps. A subclass adds its layers and a ``norm`` behind them.
    """

    config: DrafterConfig
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    norm: nn.RMSNorm
    d2t: Tensor
    t2d: Tensor
    calibration: Calibration | None = None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            register_target_parts(self, config)

    @property
    def block_size(self) -> int:
        """Draft tokens of one round, gamma."""
        return self.config.block_size

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `extend` is fed with, concatenated in this order."""
        return self.config.target_layer_ids

    @property
    def draft_vocab_size(self) -> int:
        """Columns D of the draft distribution."""
        return self.config.draft_vocab_size

    @property
    def draft_token_ids_D(self) -> Tensor | None:
        """Target id of every draft column; None where the draft vocabulary is the target's."""
        return draft_token_ids(self)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.norm.weight.dtype

    @property
    def compute_dtype(self) -> str:
        """What drafts are computed in: the parameters' type, or ``int8``."""
        return str(self.dtype).removeprefix("torch.")

    def catch_up(self, cache: DrafterCache, slots: Sequence[int]) -> None:
        """Compute what was put off of these slots' context: nothing, in a drafter that puts nothing off."""

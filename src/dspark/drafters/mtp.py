"""The MTP-1 drafter: multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437), one token ahead."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.layers import rms_norm
from dspark.drafters.mtp_config import MtpConfig
from dspark.drafters.pair_drafter import PairDrafter


class MtpDrafter(PairDrafter):
    """One decoder layer over ``W_eh [norm(embedding) ; norm(h)]``, h the output of the target's final layer.

    ``embed_tokens`` and ``lm_head`` are the target's and frozen. `dspark.drafters.pairs` says which h meets which
    token.
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.enorm = nn.RMSNorm(hidden_size, eps=eps)
            self.hnorm = nn.RMSNorm(hidden_size, eps=eps)
            self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self._add_layer(doubled=False)

    def features(self, taps_XT: Tensor) -> Tensor:
        """Features ``[X, H]`` of positions: the target's final layer output as it is."""
        return taps_XT.to(self.dtype)

    def combine(self, features_XH: Tensor, embedding_XH: Tensor) -> Tensor:
        """The stream that the layer starts from: ``W_eh [norm(embedding) ; norm(feature)]``."""
        normed = rms_norm(embedding_XH, self.enorm), rms_norm(features_XH, self.hnorm)
        return F.linear(torch.cat(normed, dim=-1), self.eh_proj.weight).to(self.dtype)

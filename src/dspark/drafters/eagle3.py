"""The Eagle3 drafter (arXiv 2503.01840): one autoregressive layer over fused target features and token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.eagle3_config import Eagle3Config
from dspark.drafters.layers import project_taps
from dspark.drafters.pair_drafter import PairDrafter


class Eagle3Drafter(PairDrafter):
    """A drafter in the published form: the names of its ``state_dict`` are those of FORMATS.md, form A, Eagle3.

    The feature of a position is ``W_fc [h^{t_1}; ...; h^{t_m}]``, without a norm. The layer's residual stream starts as
    the feature; its attention reads ``[norm(embedding) ; norm(feature)]``. ``embed_tokens`` and ``lm_head`` are the
    target's and frozen. `dspark.drafters.pairs` says which feature meets which token.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self._add_layer(doubled=True)

    def features(self, taps_XT: Tensor) -> Tensor:
        """Features ``[X, H]`` of positions: the projected taps."""
        return project_taps(taps_XT, self.fc).to(self.dtype)

    def combine(self, features_XH: Tensor, embedding_XH: Tensor) -> Tensor:
        """The stream that the layer starts from: the feature; the layer itself reads the embedding beside it."""
        return features_XH

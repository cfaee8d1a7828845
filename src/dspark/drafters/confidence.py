"""Confidence head: how likely a draft token is to be accepted, given that all before it are (SPEC eq. 7)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """``c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b)``; it sees the tokens before x_k, never x_k itself.

    Args:
        hidden_size: Width H of the backbone.
        markov_rank: Width r of the sequential head's token embedding, or 0 to look at h_k alone.
    """

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.uses_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden_XH: Tensor, embedding_Xr: Tensor | None) -> Tensor:
        """Confidence logits ``[X]`` from backbone states and the previous tokens' embeddings, any leading shape X."""
        features = hidden_XH
        if self.uses_markov:
            assert embedding_Xr is not None
            features = torch.cat((hidden_XH, embedding_Xr.to(hidden_XH.dtype)), dim=-1)
        return F.linear(features, self.proj.weight, self.proj.bias).squeeze(-1)

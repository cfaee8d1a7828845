"""Sequential heads: the low-rank logit correction that sees the previously drafted token (SPEC eq. 4-6).

All heads end the same way, ``B_k = W2^T f_k``; they differ in how the features f_k come from the previous token's
embedding ``e_k = W1[x_{k-1}]`` and the backbone state h_k. A head is used in two modes that give the same numbers:
over whole blocks with known previous tokens (teacher forcing), and one position at a time while tokens are being
sampled.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SequentialHead(Protocol):
    """Features of the low-rank correction; ``state`` carries what a position passes to the next (None at the first)."""

    markov_w1: nn.Embedding
    markov_w2: nn.Linear

    def block_features(self, embedding_XGr: Tensor, hidden_XGH: Tensor) -> Tensor:
        """f_1..f_G of whole blocks, ``[X, G, r]``, any leading shape X."""
        ...

    def step_features(
        self, embedding_Rr: Tensor, hidden_RH: Tensor, state_Rr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """f_k ``[R, r]`` of one position of every row, and the state for the next position."""
        ...


class VanillaHead(nn.Module):
    """Markov head: ``B(x_{k-1}, .) = W1[x_{k-1}] W2``."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def block_features(self, embedding_XGr: Tensor, hidden_XGH: Tensor) -> Tensor:
        return embedding_XGr

    def step_features(
        self, embedding_Rr: Tensor, hidden_RH: Tensor, state_Rr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return embedding_Rr, None


class GatedHead(nn.Module):
    """``B = (sigmoid(W_g [h_k ; W1[x_{k-1}]]) * W1[x_{k-1}]) W2``."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def block_features(self, embedding_XGr: Tensor, hidden_XGH: Tensor) -> Tensor:
        inputs = torch.cat((hidden_XGH, embedding_XGr.to(hidden_XGH.dtype)), dim=-1)
        return torch.sigmoid(F.linear(inputs, self.gate_proj.weight, self.gate_proj.bias)) * embedding_XGr

    def step_features(
        self, embedding_Rr: Tensor, hidden_RH: Tensor, state_Rr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.block_features(embedding_Rr, hidden_RH), None


class RnnHead(nn.Module):
    """Recurrent head, with ``z_k = [s_{k-1} ; W1[x_{k-1}] ; h_k]`` and ``s_0 = 0``::

        g = sigmoid(W_g z_k);  s_k = g * s_{k-1} + (1 - g) * tanh(W_c z_k);  B_k = W2^T tanh(W_o z_k)

    ``joint_proj`` holds W_g, W_c, W_o in that order.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def block_features(self, embedding_XGr: Tensor, hidden_XGH: Tensor) -> Tensor:
        driven_XG3r = self._driven(embedding_XGr, hidden_XGH)
        state: Tensor | None = None
        features = []
        for driven_X3r in driven_XG3r.unbind(-2):
            feature, state = self._advance(driven_X3r, state)
            features.append(feature)
        return torch.stack(features, dim=-2)

    def step_features(
        self, embedding_Rr: Tensor, hidden_RH: Tensor, state_Rr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._advance(self._driven(embedding_Rr, hidden_RH), state_Rr)

    def _driven(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """The part of the projection that does not depend on the state: all positions in one product."""
        inputs = torch.cat((embedding.to(hidden.dtype), hidden), dim=-1)
        return F.linear(inputs, self.joint_proj.weight[:, self.rank :], self.joint_proj.bias)

    def _advance(self, driven_X3r: Tensor, state_Xr: Tensor | None) -> tuple[Tensor, Tensor]:
        if state_Xr is None:
            gate, candidate, output = driven_X3r.chunk(3, dim=-1)
            return torch.tanh(output), (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        joint = driven_X3r + F.linear(state_Xr, self.joint_proj.weight[:, : self.rank])
        gate, candidate, output = joint.chunk(3, dim=-1)
        return torch.tanh(output), torch.lerp(torch.tanh(candidate), state_Xr, torch.sigmoid(gate))


HEADS: dict[str, type[VanillaHead] | type[GatedHead] | type[RnnHead]] = {
    "vanilla": VanillaHead,
    "gated": GatedHead,
    "rnn": RnnHead,
}


def embed_previous(head: SequentialHead, previous_X: Tensor) -> Tensor:
    """``W1[x_{k-1}]``: rows ``[X, r]`` of the previous tokens, given as target ids."""
    return F.embedding(previous_X, head.markov_w1.weight, sparse=head.markov_w1.sparse)


def corrected_logits(head: SequentialHead, base_ND: Tensor, features_Nr: Tensor) -> Tensor:
    """``U + f W2``: base logits plus the low-rank correction, in one pass where the dtypes allow it."""
    weight_Dr = head.markov_w2.weight
    if base_ND.dtype == features_Nr.dtype == weight_Dr.dtype or torch.is_autocast_enabled(base_ND.device.type):
        return torch.addmm(base_ND, features_Nr, weight_Dr.t())
    return base_ND + F.linear(features_Nr.to(weight_Dr.dtype), weight_Dr)

"""A start for attention: heads of a new parallel drafter look at the tokens just before their block.

With random weights a block slot sees the mean of its whole context, in which the last token, the one that says most of
what comes next, is one of hundreds; a few hundred steps go by until heads have found it. Here they know where it is
before the first step, and what they take from there is learned as ever.

Queries and keys get a part that does not depend on content: ``W_q += u c_q^T`` and ``W_k += u c_k^T``, where
``c_q^T x`` and ``c_k^T h`` are 1 on the average input. Rotated by positions that are D apart, that part has the score
``sum_i u_i^2 cos(theta_i D)``: largest close by, and the higher the frequencies that u is made of, the faster it falls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.backbone import DraftLayer
from dspark.drafters.dspark import DSparkDrafter
from dspark.models.rope import RopeSettings

__all__ = ["look_back"]

_LOWEST_FREQUENCY = 0.02
"""In radians a token: u is made of what turns as fast or faster. Of a few high frequencies alone the score would come
back further away, where all of them happen to agree again."""


@torch.no_grad()
def look_back(drafter: DSparkDrafter, taps_NT: Tensor, token_ids_N: Tensor, *, strength: float) -> None:
    """Turn the heads of all layers to what lies just before the block.

    Args:
        drafter: with random layers; changed in place.
        taps_NT: target features of some text, whose tokens are ``token_ids_N``.
        strength: size of the part that does not depend on content, relative to the random one.
    """
    config = drafter.config
    context_NH = drafter.context_features(taps_NT.to(drafter.dtype))
    embedding_VH = drafter.embed_tokens.weight
    inputs_NH = F.rms_norm(embedding_VH[token_ids_N], (config.hidden_size,))
    mask_H = F.rms_norm(embedding_VH[config.mask_token_id], (config.hidden_size,))
    query_H = _reads_one(torch.stack((inputs_NH.mean(dim=0), mask_H)))
    key_H = _reads_one(context_NH.mean(dim=0, keepdim=True))
    length = strength * config.initializer_range * config.hidden_size**0.5
    u_d = length * _direction(config.rope_theta, config.head_dim).to(context_NH)
    for layer in drafter.layers:
        assert isinstance(layer, DraftLayer)
        for projection, reads_H in ((layer.self_attn.q_proj, query_H), (layer.self_attn.k_proj, key_H)):
            projection.weight.unflatten(0, (-1, config.head_dim)).add_(torch.outer(u_d, reads_H))


def _reads_one(inputs_KH: Tensor) -> Tensor:
    """The shortest vector whose product with each of the inputs is 1."""
    vector_H: Tensor = torch.linalg.pinv(inputs_KH) @ inputs_KH.new_ones(len(inputs_KH))
    return vector_H


def _direction(theta: float, head_dim: int) -> Tensor:
    """``[d]`` of mean square 1: the first of each pair of dimensions that turns fast enough."""
    frequencies = torch.tensor(RopeSettings.default(head_dim, theta).inverse_frequencies)
    is_fast = frequencies >= _LOWEST_FREQUENCY
    size = (head_dim / int(is_fast.sum())) ** 0.5
    return F.pad(size * is_fast, (0, head_dim - len(frequencies)))

"""Which feature meets which token, against a computation of one block written out with loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters import Eagle3Drafter, MtpDrafter
from tests.drafters.conftest import Context
from tests.drafters.test_kinds import Forced, fill

DrafterOf = Callable[..., Eagle3Drafter | MtpDrafter]
ContextOf = Callable[[Eagle3Drafter | MtpDrafter, int], Context]


def written_out(drafter: Eagle3Drafter | MtpDrafter, context: Context, drafted: list[int], *, shift: int = 1) -> Tensor:
    """Logits ``[G, D]`` of the steps that read ``drafted`` (the anchor first), for one sequence, pair by pair.

    ``shift``: how far ahead of its feature a pair's token is; 1 is the right pairing.
    """
    weights = drafter.state_dict()
    config = drafter.config

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (weights[f"layers.0.self_attn.{name}_proj.weight"] @ x).view(-1, config.head_dim)

    def rotated(x_hd: Tensor, position: int) -> Tensor:
        half = config.head_dim // 2
        angles = position / config.rope_theta ** (torch.arange(half) / half)
        first, second = x_hd[:, :half], x_hd[:, half:]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    tokens = [*context.tokens_N.tolist(), *drafted]
    length = len(context.tokens_N)
    if isinstance(drafter, Eagle3Drafter):
        features = [weights["fc.weight"] @ taps for taps in context.taps_NT]
    else:
        features = list(context.taps_NT)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    for index in range(length + len(drafted) - 1):
        embedding = weights["embed_tokens.weight"][tokens[index + shift]]
        stream = features[index]
        if isinstance(drafter, Eagle3Drafter):
            inputs = torch.cat((norm(embedding, "layers.0.input_layernorm"), norm(stream, "layers.0.hidden_norm")))
        else:
            stream = weights["eh_proj.weight"] @ torch.cat((norm(embedding, "enorm"), norm(stream, "hnorm")))
            inputs = norm(stream, "layers.0.input_layernorm")
        queries = rotated(norm(heads(inputs, "q"), "layers.0.self_attn.q_norm"), index)
        keys.append(rotated(norm(heads(inputs, "k"), "layers.0.self_attn.k_norm"), index))
        values.append(heads(inputs, "v"))
        if index < length - 1:
            continue
        group = config.num_attention_heads // config.num_key_value_heads
        mixed = []
        for head, query in enumerate(queries):
            scores = torch.stack([key[head // group] @ query for key in keys]) / config.head_dim**0.5
            mixed.append(scores.softmax(0) @ torch.stack([value[head // group] for value in values]))
        stream = stream + weights["layers.0.self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = norm(stream, "layers.0.post_attention_layernorm")
        gate = F.silu(weights["layers.0.mlp.gate_proj.weight"] @ normed)
        up = weights["layers.0.mlp.up_proj.weight"] @ normed
        stream = stream + weights["layers.0.mlp.down_proj.weight"] @ (gate * up)
        logits.append(weights["lm_head.weight"] @ norm(stream, "norm"))
        features.append(stream)
    return torch.stack(logits)


@pytest.mark.parametrize("variant", ["eagle3", "mtp"])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_decoding_is_what_is_written_out(
    length: int, variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    context = context_of(drafter, length)
    columns = torch.tensor([[3, 1, 4, 1]])[:, : drafter.block_size]
    sampler = Forced(columns, None)
    drafter.propose(fill(drafter, {2: context}), [2], torch.tensor([9]), sampler)
    expected = written_out(drafter, context, [9, *columns[0, :-1].tolist()])
    torch.testing.assert_close(sampler.logits_RGD[0], expected, atol=2e-5, rtol=2e-5)
    if length > 1:  # the same model with every feature beside its own token says something else
        wrong = written_out(drafter, context, [9, *columns[0, :-1].tolist()], shift=0)
        assert float((wrong - expected).abs().max()) > 0.1

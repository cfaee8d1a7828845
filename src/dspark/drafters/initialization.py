"""What every drafter has of its target (embedding, LM head, vocabulary maps), and what its own parameters start as."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.protocol import DraftTarget


class TargetParts(Protocol):
    """The frozen parts that `register_target_parts` gives a drafter."""

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor

    @property
    def config(self) -> DrafterConfig: ...


def register_target_parts(drafter: nn.Module, config: DrafterConfig) -> None:
    """Add ``embed_tokens`` and ``lm_head``, frozen, and the maps ``d2t`` and ``t2d`` of a reduced vocabulary."""
    drafter.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)
    drafter.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False).requires_grad_(False)
    if config.has_reduced_vocabulary:
        drafter.register_buffer("d2t", torch.empty(config.draft_vocab_size, dtype=torch.int64))
        drafter.register_buffer("t2d", torch.empty(config.vocab_size, dtype=torch.bool))


def draft_token_ids(drafter: TargetParts) -> Tensor | None:
    """Target id of every draft column; None where the draft vocabulary is the target's."""
    if not drafter.config.has_reduced_vocabulary:
        return None
    return _token_ids(drafter.d2t, drafter.d2t._version)


@lru_cache(maxsize=8)
def _token_ids(d2t_D: Tensor, version: int) -> Tensor:
    """Made once for each drafter, so that all its requests share one tensor; ``version`` counts changes in place."""
    return d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)


def check_target(config: DrafterConfig, target: DraftTarget) -> None:
    """Raise ValueError, naming the field, unless a drafter of `config` can belong to `target`."""
    for field, drafter_value, target_value in (
        ("vocab_size", config.vocab_size, target.config.vocab_size),
        ("hidden_size", config.hidden_size, target.config.hidden_size),
        ("num_target_layers", config.num_target_layers, target.config.num_layers),
    ):
        if drafter_value != target_value:
            raise ValueError(
                f"{field} is {drafter_value} in the drafter but {target_value} in the target; "
                "use the target it was trained for"
            )


def vocabulary_maps(config: DrafterConfig, draft_token_ids_D: Tensor) -> tuple[Tensor, Tensor]:
    """``(d2t, t2d)`` of a reduced vocabulary: offsets with ``target id = i + d2t[i]``, and membership of every target
    token.

    Raises:
        ValueError: unless the ids are `config.draft_vocab_size` different tokens of the target.
    """
    ids = draft_token_ids_D
    if len(ids) != config.draft_vocab_size:
        raise ValueError(f"draft_token_ids holds {len(ids)} tokens but draft_vocab_size is {config.draft_vocab_size}")
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(f"draft_token_ids (d2t) names a token outside the target's vocabulary of {config.vocab_size}")
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    if int(t2d.sum()) != len(ids):
        raise ValueError("draft_token_ids (d2t) names a token twice")
    return ids - torch.arange(len(ids), device=ids.device), t2d


def start_from_target(
    drafter: nn.Module,
    config: DrafterConfig,
    target: DraftTarget,
    draft_token_ids: Sequence[int] | Tensor | None,
    *,
    dtype: torch.dtype,
    generator: torch.Generator | None,
) -> None:
    """Give a drafter without values those it starts its training with.

    Embedding and LM head are the target's (shared where the dtype agrees). Matrices start normal with standard
    deviation `config.initializer_range`, norms at one, biases and the sequential head's W2 at zero, so that the
    first corrected logits are the base logits.

    Args:
        drafter: Filled in place.
        config: Sizes of the drafter; they must agree with the target's.
        target: The frozen model.
        draft_token_ids: Target ids of the draft vocabulary, in any order; needed exactly when it is reduced.
        dtype: Type of the parameters.
        generator: Source of the random start.

    Raises:
        ValueError: naming the field in which drafter and target, or the draft vocabulary, disagree.
    """
    check_target(config, target)
    embedding_VH = target.embedding_weight_VH.detach().to(dtype)
    head_VH = target.lm_head_weight_VH.detach()
    device = embedding_VH.device
    tensors: dict[str, Tensor] = {"embed_tokens.weight": embedding_VH}
    if config.has_reduced_vocabulary:
        if draft_token_ids is None:
            raise ValueError("draft_token_ids is missing although draft_vocab_size is smaller than vocab_size")
        ids_D = torch.as_tensor(draft_token_ids, dtype=torch.int64, device=device).sort().values
        tensors["d2t"], tensors["t2d"] = vocabulary_maps(config, ids_D)
        tensors["lm_head.weight"] = head_VH[ids_D].to(dtype)
    else:
        if draft_token_ids is not None:
            raise ValueError(
                "draft_token_ids given although draft_vocab_size equals vocab_size; lower draft_vocab_size"
            )
        tensors["lm_head.weight"] = head_VH.to(dtype)
    for name, parameter in drafter.named_parameters():
        if name not in tensors:
            value = _initial_value(name, parameter.shape, config.initializer_range, generator)
            tensors[name] = value.to(dtype=dtype, device=device)
    drafter.load_state_dict(tensors, assign=True)


def _initial_value(name: str, shape: torch.Size, deviation: float, generator: torch.Generator | None) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias") or name == "markov_head.markov_w2.weight":
        return torch.zeros(shape)
    if name == "markov_head.markov_w1.weight":
        deviation = shape[-1] ** -0.5
    # Drawn in float32 on the CPU, so that a seed means the same start everywhere.
    return torch.randn(shape, generator=generator) * deviation

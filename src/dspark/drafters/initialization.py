"""What a new drafter starts from: agreement with its target, vocabulary maps, first values of the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.drafters.config import DSparkConfig
from dspark.drafters.protocol import DraftTarget


def check_target(config: DSparkConfig, target: DraftTarget) -> None:
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


def vocabulary_maps(config: DSparkConfig, draft_token_ids_D: Tensor) -> tuple[Tensor, Tensor]:
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


def initial_tensor(
    name: str,
    parameter: Tensor,
    config: DSparkConfig,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    """First value of the parameter called `name`; see `DSparkDrafter.from_target`."""
    if name.endswith("norm.weight"):
        return torch.ones(parameter.shape, dtype=dtype, device=device)
    if name.endswith(".bias") or name == "markov_head.markov_w2.weight":
        return torch.zeros(parameter.shape, dtype=dtype, device=device)
    # Draw in float32 on the CPU, so that a seed means the same start everywhere.
    deviation = config.markov_rank**-0.5 if name == "markov_head.markov_w1.weight" else config.initializer_range
    return (torch.randn(parameter.shape, generator=generator) * deviation).to(dtype=dtype, device=device)

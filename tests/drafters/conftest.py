"""Tiny random drafters and the target they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dspark.drafters import DSparkConfig, DSparkDrafter

VOCAB_SIZE = 53
DRAFT_TOKEN_IDS = (1, 2, 5, 7, 8, 11, 20, 21, 30, 31, 40, 52)
BASE = DSparkConfig(
    vocab_size=VOCAB_SIZE,
    draft_vocab_size=VOCAB_SIZE,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    num_target_layers=5,
    target_layer_ids=(0, 2, 3),
    block_size=4,
    mask_token_id=50,
)
KINDS = ("none", "vanilla", "gated", "rnn")


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of the stand-in target."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 24
    num_layers: int = 5


class FakeTarget:
    """Only what a drafter takes from a target."""

    def __init__(self, sizes: TargetSizes | None = None) -> None:
        self.config = sizes or TargetSizes()
        generator = torch.Generator().manual_seed(1)
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.embedding_weight_VH = torch.randn(shape, generator=generator)
        self.lm_head_weight_VH = torch.randn(shape, generator=generator)


def make_config(
    kind: str = "vanilla", *, confidence: bool = True, reduced: bool = False, **changes: object
) -> DSparkConfig:
    """A tiny config with the given sequential head."""
    has_head = kind != "none"
    settings: dict[str, object] = {
        "markov_rank": 6 if has_head else 0,
        "markov_head_type": kind if has_head else None,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and has_head,
        "draft_vocab_size": len(DRAFT_TOKEN_IDS) if reduced else VOCAB_SIZE,
    }
    return replace(BASE, **{**settings, **changes})  # type: ignore[arg-type]


def make_drafter(config: DSparkConfig, target: FakeTarget | None = None) -> DSparkDrafter:
    """A drafter whose every parameter is random, so that no part of it is a no-op."""
    ids = DRAFT_TOKEN_IDS if config.has_reduced_vocabulary else None
    generator = torch.Generator().manual_seed(2)
    drafter = DSparkDrafter.from_target(config, target or FakeTarget(), ids, generator=generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return drafter


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def config_of() -> Callable[..., DSparkConfig]:
    return make_config


@pytest.fixture
def drafter_of() -> Callable[..., DSparkDrafter]:
    """``drafter_of(kind, **settings)``: see `make_config`."""

    def make(kind: str = "vanilla", **settings: object) -> DSparkDrafter:
        return make_drafter(make_config(kind, **settings))  # type: ignore[arg-type]

    return make


@pytest.fixture
def taps_of() -> Callable[[int], Tensor]:
    """``taps_of(n)``: random features of n positions."""
    generator = torch.Generator().manual_seed(3)

    def make(count: int) -> Tensor:
        return torch.randn(count, 3 * BASE.hidden_size, generator=generator)

    return make

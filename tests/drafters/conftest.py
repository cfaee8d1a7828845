"""Tiny random drafters and the target they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dspark.drafters import DSparkConfig, Eagle3Config, MtpConfig, TrainableDrafter
from dspark.drafters.registry import AnyConfig, drafter_from_target

VOCAB_SIZE = 53
HIDDEN_SIZE = 24
DRAFT_TOKEN_IDS = (1, 2, 5, 7, 8, 11, 20, 21, 30, 31, 40, 52)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_target_layers": 5,
}
BASE = {
    "dspark": DSparkConfig(**SIZES, num_hidden_layers=2, target_layer_ids=(0, 2, 3), block_size=4, mask_token_id=50),
    "eagle3": Eagle3Config(**SIZES, target_layer_ids=(0, 2, 3), ttt_length=4),
    "mtp": MtpConfig(**SIZES, target_layer_ids=(4,)),
}
VARIANTS = ("none", "vanilla", "gated", "rnn", "eagle3", "mtp")
"""Of DSpark by its sequential head ("none" is DFlash), and the other kinds."""


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of the stand-in target."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = HIDDEN_SIZE
    num_layers: int = 5


class FakeTarget:
    """Only what a drafter takes from a target."""

    compute_dtype = "float32"

    def __init__(self, sizes: TargetSizes | None = None) -> None:
        self.config = sizes or TargetSizes()
        generator = torch.Generator().manual_seed(1)
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.embedding_weight_VH = torch.randn(shape, generator=generator)
        self.lm_head_weight_VH = torch.randn(shape, generator=generator)


def make_config(
    variant: str = "vanilla", *, confidence: bool = True, reduced: bool = False, **changes: object
) -> AnyConfig:
    """A tiny config of one of `VARIANTS`."""
    settings: dict[str, Any] = {"draft_vocab_size": len(DRAFT_TOKEN_IDS) if reduced else VOCAB_SIZE}
    if variant in BASE:
        return replace(BASE[variant], **{**settings, **changes})
    has_head = variant != "none"
    settings |= {
        "markov_rank": 6 if has_head else 0,
        "markov_head_type": variant if has_head else None,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and has_head,
    }
    return replace(BASE["dspark"], **{**settings, **changes})


def make_drafter(config: AnyConfig, target: FakeTarget | None = None) -> TrainableDrafter:
    """A drafter whose every parameter is random, so that no part of it is a no-op."""
    ids = DRAFT_TOKEN_IDS if config.has_reduced_vocabulary else None
    generator = torch.Generator().manual_seed(2)
    drafter = drafter_from_target(config, target or FakeTarget(), ids, generator=generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return drafter


class Context(NamedTuple):
    """Tokens and their features."""

    tokens_N: Tensor
    taps_NT: Tensor

    def cut(self, start: int, end: int | None = None) -> Context:
        return Context(self.tokens_N[start:end], self.taps_NT[start:end])

    def __add__(self, other: tuple[Any, ...]) -> Context:
        assert isinstance(other, Context)
        return Context(torch.cat((self.tokens_N, other.tokens_N)), torch.cat((self.taps_NT, other.taps_NT)))


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def config_of() -> Callable[..., Any]:
    return make_config


@pytest.fixture
def drafter_of() -> Callable[..., Any]:
    """``drafter_of(variant, **settings)``: see `make_config`."""

    def make(variant: str = "vanilla", **settings: object) -> TrainableDrafter:
        return make_drafter(make_config(variant, **settings))  # type: ignore[arg-type]

    return make


@pytest.fixture
def context_of() -> Callable[..., Context]:
    """``context_of(drafter, n)``: n random tokens, with features of the width that `drafter` takes."""
    generator = torch.Generator().manual_seed(3)

    def make(drafter: TrainableDrafter, count: int) -> Context:
        width = len(drafter.tap_layers) * HIDDEN_SIZE
        return Context(
            torch.randint(VOCAB_SIZE, (count,), generator=generator), torch.randn(count, width, generator=generator)
        )

    return make

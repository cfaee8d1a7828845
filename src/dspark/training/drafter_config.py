"""Sizes of the drafter that a recipe asks for."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from dspark.drafters.dspark_config import DSparkConfig
from dspark.drafters.eagle3_config import Eagle3Config
from dspark.drafters.mtp_config import MtpConfig
from dspark.drafters.registry import AnyConfig, drafter_kind, read_config
from dspark.models.loading import LoadedTarget
from dspark.training.recipe import DFlashRecipe, DSparkRecipe, Eagle3Recipe, MtpRecipe, Recipe

__all__ = ["check_given_config", "drafter_config"]

_FREE_OF_A_GIVEN_DRAFTER = ("num_anchors", "initializer_range", "max_position_embeddings", "step_loss_decay")

_RECIPE_KEYS = {
    "draft_vocab_size": "draft_vocab_size",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "mask_token_id": "mask_token",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "target_layer_ids": "tap_layers",
}
"""Published field names, and what recipes call them."""


def drafter_config(recipe: Recipe, target: LoadedTarget) -> AnyConfig:
    """Sizes of the drafter: the recipe's, and the target's where the recipe says nothing.

    Raises:
        ValueError: naming the recipe's key, where they do not go together.
    """
    try:
        return _config(recipe, target)
    except ValueError as error:
        published = rf"(?<!\.)\b({'|'.join(_RECIPE_KEYS)})\b"
        raise ValueError(re.sub(published, lambda found: f"drafter.{_RECIPE_KEYS[found[0]]}", str(error))) from error


def _config(recipe: Recipe, target: LoadedTarget) -> AnyConfig:
    ours, theirs = recipe.drafter, target.model.config
    shared: dict[str, Any] = {
        "vocab_size": theirs.vocab_size,
        "draft_vocab_size": ours.draft_vocab_size or theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": ours.intermediate_size or theirs.intermediate_size,
        "num_attention_heads": ours.num_heads or theirs.num_heads,
        "num_key_value_heads": ours.num_kv_heads or theirs.num_kv_heads,
        "head_dim": ours.head_dim or theirs.head_dim,
        "max_position_embeddings": theirs.max_position_embeddings,
        "num_target_layers": theirs.num_layers,
        "target_layer_ids": recipe.tap_layers(theirs.num_layers),
        "rms_norm_eps": theirs.norm_eps,
        "rope_theta": theirs.rope_theta,
    }
    match ours:
        case MtpRecipe():
            return MtpConfig(**shared)
        case Eagle3Recipe():
            return Eagle3Config(**shared, ttt_length=ours.block_size)
        case DFlashRecipe() | DSparkRecipe():
            shared |= {
                "num_hidden_layers": ours.num_layers,
                "block_size": ours.block_size,
                "mask_token_id": _mask_token_id(ours.mask_token, target),
                "sample_from_anchor": ours.sample_from_anchor,
            }
    if isinstance(ours, DFlashRecipe):
        return DSparkConfig(**shared)
    has_head = ours.markov_head != "none"
    return DSparkConfig(
        **shared,
        markov_rank=ours.markov_rank if has_head else 0,
        markov_head_type=ours.markov_head if has_head else None,
        enable_confidence_head=ours.confidence_head,
        confidence_head_with_markov=ours.confidence_head and ours.confidence_head_with_markov and has_head,
    )


def check_given_config(directory: Path, config: AnyConfig) -> None:
    """Check that the drafter of ``drafter.initialise_from`` is one that the recipe asks for.

    Raises:
        ValueError: it is no drafter, or one of another kind or shape.
    """
    given = read_config(directory / "config.json")
    if type(given) is not type(config):
        raise ValueError(
            f"drafter.initialise_from: {directory} is of kind {drafter_kind(given)}, drafter.kind is "
            f"{drafter_kind(config)}: make them agree"
        )
    different = [
        f"{field.name} {getattr(given, field.name)} (recipe: {getattr(config, field.name)})"
        for field in fields(config)
        if field.name not in _FREE_OF_A_GIVEN_DRAFTER and getattr(given, field.name) != getattr(config, field.name)
    ]
    if different:
        raise ValueError(f"drafter.initialise_from: {directory} differs from the recipe in {', '.join(different)}")


def _mask_token_id(mask_token: int | str, target: LoadedTarget) -> int:
    if isinstance(mask_token, int):
        return mask_token
    token_id = target.tokenizer.convert_tokens_to_ids(mask_token)
    if not isinstance(token_id, int) or target.tokenizer.convert_ids_to_tokens(token_id) != mask_token:
        raise ValueError(
            f"drafter.mask_token {mask_token!r} is not one token of {target.name}: "
            "name an unused special token, or its id"
        )
    return token_id

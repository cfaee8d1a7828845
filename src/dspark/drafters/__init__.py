"""Drafters: models that propose a block of tokens for the target to verify."""

from __future__ import annotations

from dspark.drafters.cache import DrafterCache
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.drafters.config import DSparkConfig
from dspark.drafters.dspark import DSparkDrafter, TrainingOutput
from dspark.drafters.protocol import DraftBlock, Drafter, DraftSampler, DraftTarget, greedy_sampler

__all__ = [
    "DSparkConfig",
    "DSparkDrafter",
    "DraftBlock",
    "DraftSampler",
    "DraftTarget",
    "Drafter",
    "DrafterCache",
    "TrainingOutput",
    "greedy_sampler",
    "load_drafter",
    "save_drafter",
]

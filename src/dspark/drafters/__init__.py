"""Drafters: models that propose a block of tokens for the target to verify."""

from __future__ import annotations

from dspark.drafters.cache import DrafterCache
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.dspark_config import DSparkConfig
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.eagle3_config import Eagle3Config
from dspark.drafters.mtp import MtpDrafter
from dspark.drafters.mtp_config import MtpConfig
from dspark.drafters.packing import PackedBlocks
from dspark.drafters.protocol import DraftBlock, Drafter, DraftSampler, DraftTarget, greedy_sampler
from dspark.drafters.registry import TrainableDrafter, drafter_kind

__all__ = [
    "DSparkConfig",
    "DSparkDrafter",
    "DraftBlock",
    "DraftSampler",
    "DraftTarget",
    "Drafter",
    "DrafterCache",
    "Eagle3Config",
    "Eagle3Drafter",
    "MtpConfig",
    "MtpDrafter",
    "PackedBlocks",
    "TrainableDrafter",
    "drafter_kind",
    "greedy_sampler",
    "load_drafter",
    "save_drafter",
]

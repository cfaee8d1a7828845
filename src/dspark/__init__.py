"""DSpark: lossless speculative decoding for any causal language model.

The public names below are imported on first use, so that ``import dspark`` is instant.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

# GNU OpenMP, which torch brings, reads it when it is loaded. By default its threads keep their cores busy for
# milliseconds after each of torch's operations, and the threads of compiled passes wait for these cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from dspark.decoding.settings import SamplingSettings as SamplingSettings
    from dspark.drafters.checkpoint import load_drafter as load_drafter
    from dspark.drafters.checkpoint import save_drafter as save_drafter
    from dspark.drafters.dspark import DSparkDrafter as DSparkDrafter
    from dspark.drafters.dspark_config import DSparkConfig as DSparkConfig
    from dspark.engine.engine import Engine as Engine
    from dspark.engine.generation import generate as generate
    from dspark.engine.grammar import Grammar as Grammar
    from dspark.engine.grammar import GrammarCompiler as GrammarCompiler
    from dspark.engine.queue import QueueFull as QueueFull
    from dspark.engine.request import Completion as Completion
    from dspark.engine.request import Delta as Delta
    from dspark.engine.request import Request as Request
    from dspark.engine.request import RequestResult as RequestResult
    from dspark.engine.request import SpeculationCounts as SpeculationCounts
    from dspark.engine.request import TokenLogprob as TokenLogprob
    from dspark.engine.result import GenerationResult as GenerationResult
    from dspark.engine.result import RoundEvent as RoundEvent
    from dspark.engine.settings import EngineSettings as EngineSettings
    from dspark.engine.speculation import SpeculationSettings as SpeculationSettings
    from dspark.engine.statistics import EngineStatistics as EngineStatistics
    from dspark.engine.submitted import EngineError as EngineError
    from dspark.engine.submitted import Generation as Generation
    from dspark.models.loading import LoadedTarget as LoadedTarget
    from dspark.models.loading import load_target as load_target
    from dspark.server.app import create_app as create_app
    from dspark.server.settings import ServerSettings as ServerSettings

_MODULES = {
    "Completion": "dspark.engine.request",
    "DSparkConfig": "dspark.drafters.dspark_config",
    "DSparkDrafter": "dspark.drafters.dspark",
    "Delta": "dspark.engine.request",
    "Engine": "dspark.engine.engine",
    "EngineError": "dspark.engine.submitted",
    "EngineSettings": "dspark.engine.settings",
    "EngineStatistics": "dspark.engine.statistics",
    "Generation": "dspark.engine.submitted",
    "GenerationResult": "dspark.engine.result",
    "Grammar": "dspark.engine.grammar",
    "GrammarCompiler": "dspark.engine.grammar",
    "LoadedTarget": "dspark.models.loading",
    "QueueFull": "dspark.engine.queue",
    "Request": "dspark.engine.request",
    "RequestResult": "dspark.engine.request",
    "RoundEvent": "dspark.engine.result",
    "SamplingSettings": "dspark.decoding.settings",
    "ServerSettings": "dspark.server.settings",
    "SpeculationCounts": "dspark.engine.request",
    "SpeculationSettings": "dspark.engine.speculation",
    "TokenLogprob": "dspark.engine.request",
    "create_app": "dspark.server.app",
    "generate": "dspark.engine.generation",
    "load_drafter": "dspark.drafters.checkpoint",
    "load_target": "dspark.models.loading",
    "save_drafter": "dspark.drafters.checkpoint",
}

__all__ = ["__version__", *_MODULES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

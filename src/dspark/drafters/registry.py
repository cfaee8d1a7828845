"""Every kind of drafter: its name, its classes, its names on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.config import architecture_of, read_object
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.dspark_config import ARCHITECTURE as DSPARK_ARCHITECTURE
from dspark.drafters.dspark_config import NESTED_ARCHITECTURES, DSparkConfig
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.drafters.eagle3_config import ARCHITECTURE as EAGLE3_ARCHITECTURE
from dspark.drafters.eagle3_config import Eagle3Config
from dspark.drafters.initialization import start_from_target
from dspark.drafters.mtp import MtpDrafter
from dspark.drafters.mtp_config import ARCHITECTURE as MTP_ARCHITECTURE
from dspark.drafters.mtp_config import MtpConfig
from dspark.drafters.protocol import DraftTarget

TrainableDrafter = DSparkDrafter | Eagle3Drafter | MtpDrafter
"""Any drafter of ours: a `Drafter` that is a torch module and can be trained."""

AnyConfig = DSparkConfig | Eagle3Config | MtpConfig

_READERS: dict[str, Callable[[Mapping[str, Any]], AnyConfig]] = {
    DSPARK_ARCHITECTURE: DSparkConfig.from_dict,
    **dict.fromkeys(NESTED_ARCHITECTURES, DSparkConfig.from_dict),
    EAGLE3_ARCHITECTURE: Eagle3Config.from_dict,
    MTP_ARCHITECTURE: MtpConfig.from_dict,
}


def drafter_kind(config: AnyConfig) -> str:
    """``drafter.kind`` of a recipe for such a drafter; ``dflash`` has neither sequential nor confidence head."""
    match config:
        case Eagle3Config():
            return "eagle3"
        case MtpConfig():
            return "mtp"
        case DSparkConfig():
            return "dspark" if config.markov_rank > 0 or config.enable_confidence_head else "dflash"


def new_drafter(config: AnyConfig) -> TrainableDrafter:
    """The drafter of a configuration, without values."""
    match config:
        case Eagle3Config():
            return Eagle3Drafter(config)
        case MtpConfig():
            return MtpDrafter(config)
        case DSparkConfig():
            return DSparkDrafter(config)


def drafter_from_target(
    config: AnyConfig,
    target: DraftTarget,
    draft_token_ids: Sequence[int] | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> TrainableDrafter:
    """A new drafter of any kind, to be trained for `target`; see `start_from_target`."""
    drafter = new_drafter(config)
    start_from_target(drafter, config, target, draft_token_ids, dtype=dtype, generator=generator)
    return drafter


def read_config(path: Path) -> AnyConfig:
    """Read a drafter's ``config.json``, whatever its kind.

    Raises:
        ValueError: naming the file, and the field that is missing, unknown, or asks for something not implemented.
    """
    content = read_object(path)
    try:
        architecture = architecture_of(content)
        if architecture not in _READERS:
            raise ValueError(
                f"architectures {architecture!r} is not supported; it must be one of {', '.join(_READERS)}"
            )
        return _READERS[architecture](content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

"""Opening the target and its drafter as the options say."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.cli.options import EMBEDDED, NO_DRAFTER

if TYPE_CHECKING:
    from dspark.drafters.registry import TrainableDrafter
    from dspark.models.loading import LoadedTarget


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target and, unless speculation is off, the drafter for it."""

    target: LoadedTarget
    drafter: TrainableDrafter | None
    drafter_name: str


def open_models(*, target: str, drafter: str | None, speculation: bool, dtype: str, device: str) -> Models:
    """Load the target and the drafter that goes with it.

    ``drafter`` None means ours for the embedded target. Raises ValueError when another target comes without one,
    before anything is loaded.
    """
    name = _drafter_name(target, drafter) if speculation else NO_DRAFTER
    loaded = open_target(target, dtype=dtype, device=device)
    if name == NO_DRAFTER:
        return Models(target=loaded, drafter=None, drafter_name=NO_DRAFTER)

    from dspark.drafters.checkpoint import load_drafter

    opened = load_drafter(name, loaded.model, device=loaded.model.device)
    return Models(target=loaded, drafter=opened, drafter_name=name)


def open_target(name: str, *, dtype: str, device: str) -> LoadedTarget:
    """Load a target, and say on stderr what its user should know (that it is not native, and why)."""
    from dspark.models.loading import load_target

    loaded = load_target(name, dtype=dtype, device=device)
    for notice in loaded.notices:
        print(f"dspark: {notice}", file=sys.stderr)
    return loaded


def _drafter_name(target: str, drafter: str | None) -> str:
    if drafter is None:
        if target != EMBEDDED:
            raise ValueError(
                f"--target {target} needs a drafter that was trained for it: give --drafter DIRECTORY,"
                " or --no-speculation to use the target alone"
            )
        return EMBEDDED
    if drafter not in (EMBEDDED, NO_DRAFTER) and not Path(drafter).is_dir():
        raise ValueError(
            f"--drafter {drafter}: no such directory; a drafter is a directory with config.json and model.safetensors"
        )
    return drafter

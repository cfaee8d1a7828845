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


def open_models(
    *, target: str, drafter: str | None, speculation: bool, dtype: str, device: str, calibrated: bool = True
) -> Models:
    """Load the target and the drafter that goes with it, and say on stderr what calibration the drafter has.

    ``drafter`` None means ours for the embedded target; without ``calibrated`` its confidences are raw. Raises
    ValueError when another target comes without one, before anything is loaded.
    """
    name = _drafter_name(target, drafter) if speculation else NO_DRAFTER
    loaded = open_target(target, dtype=dtype, device=device)
    if name == NO_DRAFTER:
        return Models(target=loaded, drafter=None, drafter_name=NO_DRAFTER)

    return Models(target=loaded, drafter=open_drafter(name, loaded, calibrated=calibrated), drafter_name=name)


def usual_draft_tokens(models: Models, asked: int | None) -> int | None:
    """Draft tokens of a round at most, None for the block: what was asked for, or what a single answer is fastest with.

    A pass of the int8 target over five tokens takes some 20 % longer than over one with AVX512-VNNI, over eight 30 %;
    with AVX2 over four tokens 20 %, over eight 80 %. Few of the later draft tokens are accepted.
    """
    if asked is not None or models.target.model.compute_dtype != "int8":
        return asked
    from dspark.models.instructions import AVX2, INSTRUCTIONS

    return 3 if INSTRUCTIONS is AVX2 else 4


def open_target(name: str, *, dtype: str, device: str) -> LoadedTarget:
    """Load a target, and say on stderr what its user should know (`LoadedTarget.notices`)."""
    from dspark.models.loading import load_target

    loaded = load_target(name, dtype=dtype, device=device)
    for notice in loaded.notices:
        print(f"dspark: {notice}", file=sys.stderr)
    return loaded


def open_drafter(name: str, target: LoadedTarget, *, calibrated: bool = True) -> TrainableDrafter:
    """Load a drafter for a target, and say on stderr what calibration it has."""
    from dspark.drafters.checkpoint import load_drafter

    opened = load_drafter(name, target.model, device=target.model.device, calibrated=calibrated)
    if opened.calibration is not None:
        print(f"dspark: {_calibration_notice(name, target)}", file=sys.stderr)
    return opened


def _calibration_notice(drafter: str, target: LoadedTarget) -> str:
    """What the drafter's calibration was fitted for, and whether that is what it is used for."""
    from dspark.drafters.checkpoint import read_drafter_calibration

    file = read_drafter_calibration(drafter)
    assert file is not None, "the drafter was loaded with it"
    regimes = [f"{regime:g}" for regime in sorted(file.calibration.by_sampling_temperature)]
    text = f"confidences of the drafter are calibrated{f' ({file.date})' if file.date else ''}"
    if regimes:
        text += f", for sampling temperatures {', '.join(regimes)}"
    fitted = file.target
    if fitted.get("fingerprint") not in (None, target.model.fingerprint):
        text += "; they were fitted with another target, so run `dspark calibrate` for this one"
    elif fitted.get("dtype") not in (None, target.model.compute_dtype):
        text += f"; they were fitted with the target in {fitted['dtype']}, and it runs in {target.model.compute_dtype}"
    return text


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

"""``calibration.json`` beside a drafter (FORMATS.md, E); ``load_drafter`` attaches what ``dspark calibrate`` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.calibration.calibration import Calibration
from dspark.files import write_json
from dspark.models.fingerprint import Fingerprint

__all__ = [
    "CALIBRATION_FILE",
    "CalibrationFile",
    "attached_calibration",
    "drafter_fingerprint",
    "read_calibration",
    "write_calibration",
]

CALIBRATION_FILE = "calibration.json"
_OURS = "dspark"
_REMEDY = "fit it again with `dspark calibrate`, or delete the file to use the confidences as they are"
# Parts that are the target's, or follow from another.
_NOT_FINGERPRINTED = frozenset({"embed_tokens.weight", "lm_head.weight", "t2d"})


@dataclass(frozen=True, kw_only=True)
class CalibrationFile:
    """What the file says.

    Attributes:
        calibration: the temperatures.
        dataset: what it was fitted on.
        num_samples: rounds that it was fitted on.
        ece_before, ece_after: mean over the regimes, by position, on rounds that the fit did not see.
        drafter: fingerprint of the drafter; None in files of other trainers.
        target: ``name``, ``fingerprint`` and ``dtype`` of the target; empty in files of other trainers.
        date: of the fit, ISO 8601; empty in files of other trainers.
        details: everything else of ours, as plain data (seed, versions, quality by regime).
    """

    calibration: Calibration
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    drafter: str | None = None
    target: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form. What only we know of is under ``dspark``, clear of the keys of other trainers."""
        by_regime = self.calibration.by_sampling_temperature
        return {
            "temperatures": list(self.calibration.temperatures),
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "ece_before": list(self.ece_before),
            "ece_after": list(self.ece_after),
            _OURS: {
                "by_sampling_temperature": {f"{regime:g}": list(own) for regime, own in sorted(by_regime.items())},
                "drafter": {"fingerprint": self.drafter, "block_size": len(self.calibration.temperatures)},
                "target": dict(self.target),
                "date": self.date,
                **self.details,
            },
        }


def drafter_fingerprint(drafter: nn.Module) -> str:
    """Hash of a drafter's own parameters; the same in whatever type it runs, and on whatever device."""
    fingerprint = Fingerprint()
    for name, tensor in sorted(drafter.state_dict().items()):
        if name not in _NOT_FINGERPRINTED:
            fingerprint.update(name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    return fingerprint.hexdigest()


def read_calibration(path: Path, *, block_size: int, fingerprint: str | None = None) -> CalibrationFile:
    """Read a calibration file of ours or of another trainer.

    Only ``temperatures`` is required. What is used is checked; keys that are not known are left aside.

    Args:
        path: the file.
        block_size: positions of the drafter.
        fingerprint: of the drafter; a file that names another one is refused.

    Raises:
        ValueError: naming file and field, and what to do about it.
        OSError: it cannot be opened.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): {_REMEDY}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object: {_REMEDY}")
    try:
        ours = _object(content.get(_OURS), _OURS)
        drafter = _object(ours.get("drafter"), f"{_OURS}.drafter").get("fingerprint")
        if fingerprint is not None and drafter is not None and drafter != fingerprint:
            raise ValueError("it belongs to another drafter, or to this one before it was trained further")
        by_regime = _object(ours.get("by_sampling_temperature"), f"{_OURS}.by_sampling_temperature")
        return CalibrationFile(
            calibration=Calibration(
                temperatures=_temperatures(content.get("temperatures"), "temperatures", block_size),
                by_sampling_temperature={
                    _regime(regime): _temperatures(own, f"{_OURS}.by_sampling_temperature.{regime}", block_size)
                    for regime, own in by_regime.items()
                },
            ),
            dataset=_text(content.get("dataset")),
            num_samples=content["num_samples"] if isinstance(content.get("num_samples"), int) else 0,
            ece_before=_numbers(content.get("ece_before")),
            ece_after=_numbers(content.get("ece_after")),
            drafter=drafter,
            target={name: _text(value) for name, value in _object(ours.get("target"), f"{_OURS}.target").items()},
            date=_text(ours.get("date")),
            details={
                name: value
                for name, value in ours.items()
                if name not in ("by_sampling_temperature", "drafter", "target", "date")
            },
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_REMEDY}") from None


def write_calibration(path: Path, file: CalibrationFile) -> None:
    """Write the file in one step; what was there stays as it was if that fails.

    Raises:
        OSError: it could not be written.
    """
    write_json(path, file.to_dict())


def attached_calibration(
    directory: Path, drafter: nn.Module, *, block_size: int, confident: bool
) -> Calibration | None:
    """The calibration that lies in a drafter's directory; None where there is none.

    Args:
        directory: the drafter's.
        drafter: with its parameters in place.
        block_size: its positions.
        confident: whether it has a confidence head.

    Raises:
        ValueError: the file cannot be used for this drafter, naming it and the remedy.
    """
    path = directory / CALIBRATION_FILE
    if not path.exists():
        return None
    if not confident:
        raise ValueError(
            f"{path}: this drafter has no confidence head, so there is nothing to calibrate; delete the file"
        )
    return read_calibration(path, block_size=block_size, fingerprint=drafter_fingerprint(drafter)).calibration


def _temperatures(value: object, name: str, block_size: int) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(_is_number(part) for part in value):
        raise ValueError(f"{name} must be a list of numbers")
    if len(value) != block_size:
        raise ValueError(f"{name} has {len(value)} numbers, but the drafter has block_size {block_size}")
    if not all(math.isfinite(part) and part > 0.0 for part in value):
        raise ValueError(f"{name} must be finite and above 0")
    return tuple(float(part) for part in value)


def _regime(text: str) -> float:
    try:
        regime = float(text)
    except ValueError:
        regime = math.nan
    if not (math.isfinite(regime) and regime >= 0.0):
        raise ValueError(f"{_OURS}.by_sampling_temperature has the key {text!r}; it must be a sampling temperature")
    return regime


def _object(value: object, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _numbers(value: object) -> tuple[float, ...]:
    return tuple(float(part) for part in value if _is_number(part)) if isinstance(value, Sequence) else ()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

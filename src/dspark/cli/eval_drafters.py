"""The drafters of an evaluation, by label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.cli.models import open_drafter
from dspark.cli.options import EMBEDDED
from dspark.drafters.calibration_file import drafter_fingerprint
from dspark.drafters.registry import TrainableDrafter, drafter_kind
from dspark.evaluation.plan import DrafterFacts
from dspark.models.loading import LoadedTarget

__all__ = ["drafter_facts", "named_drafters", "open_drafters"]


def named_drafters(given: Sequence[str], target: str) -> dict[str, str]:
    """Directory (or `embedded`) of every drafter, by label. Raises ValueError before anything is loaded."""
    if not given:
        if target != EMBEDDED:
            raise ValueError(f"--target {target} needs a drafter that was trained for it: give --drafter DIRECTORY")
        given = (EMBEDDED,)
    named: dict[str, str] = {}
    for spec in given:
        label, separator, place = spec.partition("=")
        if not separator or Path(spec).exists():
            label, place = _label(spec), spec
        if place != EMBEDDED and not Path(place).is_dir():
            raise ValueError(
                f"--drafter {spec}: no directory {place}; a drafter is a directory with config.json and "
                "model.safetensors"
            )
        if not label or label in named:
            raise ValueError(f"--drafter {spec}: every drafter needs a name of its own, give it as LABEL={place}")
        named[label] = place
    return named


def _label(place: str) -> str:
    """A run's drafter is called after the run, any other directory by its own name."""
    path = Path(place).resolve()
    return place if place == EMBEDDED else path.parent.name if path.name == "drafter" else path.name


def open_drafters(named: Mapping[str, str], target: LoadedTarget) -> dict[str, TrainableDrafter]:
    """Load them all, by label."""
    return {label: open_drafter(place, target) for label, place in named.items()}


def drafter_facts(label: str, drafter: TrainableDrafter, temperature: float) -> DrafterFacts:
    """What a report says of a drafter, with its calibration at a sampling temperature."""
    temperatures = drafter.calibration.at(temperature) if drafter.calibration is not None else ()
    return DrafterFacts(
        label=label,
        kind=drafter_kind(drafter.config),
        num_layers=drafter.config.num_hidden_layers,
        block_size=drafter.block_size,
        parameters=sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad),
        has_confidence_head=drafter.has_confidence_head,
        fingerprint=drafter_fingerprint(drafter),
        temperatures=temperatures or None,
    )

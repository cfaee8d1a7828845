"""Curves of a run in a tracker of the user's choice, besides ``log.jsonl``.

TensorBoard and trackio are optional packages, ``pip install 'dspark[tensorboard]'`` and ``pip install
'dspark[trackio]'``. Both are used locally: nothing leaves the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from dspark.training.held_out import HeldOutResult

__all__ = ["Tracker", "TrackerKind", "check_tracker", "held_out_curves", "open_tracker"]

TrackerKind = Literal["none", "tensorboard", "trackio"]

_TRACKIO_PROJECT = "dspark"


class Tracker(Protocol):
    """Takes the numbers of a run as they come."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of the named curves."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


class _NoTracker:
    def log(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard:
    """Event files in ``<run>/tensorboard``; see them with ``tensorboard --logdir``."""

    def __init__(self, directory: Path, recipe: Mapping[str, Any], done_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run wrote after its last checkpoint is done, and written, again.
        self._writer = SummaryWriter(directory / "tensorboard", purge_step=done_steps + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """A run of the local project ``dspark``, named as the run's directory; see it with ``trackio show``.

    Steps that a killed run did after its last checkpoint stay, and come a second time.
    """

    def __init__(self, directory: Path, recipe: Mapping[str, Any], done_steps: int) -> None:
        import trackio

        self._finish: Callable[[], None] = trackio.finish
        with redirect_stdout(sys.stderr):  # it greets on stdout, which belongs to --json
            self._run = trackio.init(
                project=_TRACKIO_PROJECT,
                name=directory.resolve().name,
                config=dict(recipe),
                resume="allow" if done_steps else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._finish()


_TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
}


def check_tracker(kind: TrackerKind) -> None:
    """Find out that a package is missing before anything expensive starts.

    Raises:
        ValueError: it is not installed.
    """
    if kind != "none" and find_spec(kind) is None:
        raise ValueError(
            f"tracking is {kind}, whose package is not installed: pip install 'dspark[{kind}]', or set tracking=none"
        )


def open_tracker(kind: TrackerKind, directory: Path, recipe: Mapping[str, Any], *, done_steps: int) -> Tracker:
    """The tracker of the run in ``directory``, which goes on after ``done_steps`` steps.

    Raises:
        ValueError: its package is not installed.
    """
    check_tracker(kind)
    return _NoTracker() if kind == "none" else _TRACKERS[kind](directory, recipe, done_steps)


def held_out_curves(result: HeldOutResult) -> dict[str, float]:
    """Held-out numbers by curve: accepted lengths, loss, and acceptance by position (from 1)."""
    curves = {
        "held_out/accepted_length": result.sampled.value,
        "held_out/accepted_length_greedy": result.greedy.value,
        "held_out/loss": result.loss,
    }
    if result.confidence_bce is not None:
        curves["held_out/confidence_bce"] = result.confidence_bce
    sampled = result.sampled
    for name, values in (
        ("acceptance", sampled.acceptance),
        ("conditional_acceptance", sampled.conditional_acceptance),
        ("survival", sampled.survival),
    ):
        curves |= {f"held_out/{name}_{position}": value for position, value in enumerate(values, start=1)}
    return curves

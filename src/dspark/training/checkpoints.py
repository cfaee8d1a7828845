"""Checkpoints of a run: a drafter in form A, the training state beside it, and where both came from.

``<run>/checkpoints/step-000100/`` appears by one rename, so it is whole or not there. The highest step is where a run
goes on; the best one by held-out accepted length is kept besides the last few. All tensors in it are whole, whatever
the number of processes that trained them.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dspark.drafters.checkpoint import save_drafter
from dspark.drafters.registry import TrainableDrafter
from dspark.files import remove_leftovers, replacing_directory, write_json

__all__ = ["CHECKPOINTS", "CheckpointDirectory"]

CHECKPOINTS = "checkpoints"
"""Their directory in a run."""

_STATE_FILE = "training_state.pt"
_PROVENANCE_FILE = "provenance.json"
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointDirectory:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        """Use ``directory``, which may not exist yet; ``keep`` last checkpoints stay."""
        self._directory = directory
        self._keep = keep

    def path(self, step: int) -> Path:
        """Directory of the checkpoint after ``step`` steps."""
        return self._directory / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        if not self._directory.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def describe_last(self) -> str:
        """For messages: where the run would go on."""
        steps = self.steps()
        return f"the last good checkpoint is {self.path(steps[-1])}" if steps else "no checkpoint was made yet"

    def save(
        self,
        step: int,
        drafter: TrainableDrafter,
        state: dict[str, Any],
        provenance: dict[str, Any],
        *,
        best_step: int | None,
    ) -> Path:
        """Write the checkpoint of ``step`` and drop what need not stay (never ``best_step``).

        Raises:
            OSError: it could not be written, most likely because the disk is full; earlier checkpoints are untouched.
        """
        final = self.path(step)
        try:
            if self._directory.is_dir():
                remove_leftovers(self._directory)
            with replacing_directory(final) as directory:
                save_drafter(drafter, directory, include_embeddings=False)
                torch.save({**state, "step": step}, directory / _STATE_FILE)
                write_json(directory / _PROVENANCE_FILE, {**provenance, "step": step})
        except OSError as error:
            reason = error if error.errno is None else os.strerror(error.errno)
            message = (
                f"the checkpoint of step {step} could not be written ({reason}); "
                f"{self.describe_last()}. Make room or set checkpoint.keep lower, then run the same command: it goes "
                "on from there"
            )
            raise (OSError(message) if error.errno is None else OSError(error.errno, message)) from error
        for old in self.steps()[: -self._keep]:
            if old != best_step:
                shutil.rmtree(self.path(old))
        return final

    def load_state(self, step: int) -> dict[str, Any]:
        """Training state of a checkpoint.

        Raises:
            ValueError: its file cannot be read.
        """
        path = self.path(step) / _STATE_FILE
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read ({error}): delete {path.parent} to go on from the checkpoint before it"
            ) from error
        assert isinstance(state, dict)
        return state

    def publish(self, step: int, destination: Path) -> Path:
        """Copy a checkpoint's drafter, without the training state, to ``destination``, replacing what is there.

        A destination that holds these very files stays as it is, with what was added to it since: a calibration belongs
        to the weights, and goes with them.

        Raises:
            OSError: it could not be written.
        """
        remove_leftovers(destination.parent, destination.name)
        names = [file.name for file in self.path(step).iterdir() if file.name != _STATE_FILE]
        same, _, _ = filecmp.cmpfiles(self.path(step), destination, names, shallow=False)
        if len(same) == len(names):
            return destination
        with replacing_directory(destination) as directory:
            for name in names:
                shutil.copy2(self.path(step) / name, directory)
        return destination

    def remove_all(self) -> None:
        """Delete every checkpoint."""
        if self._directory.exists():
            shutil.rmtree(self._directory)

"""Checkpoints of a run: a drafter in form A, the training state beside it, and where both came from.

``<run>/checkpoints/step-000100/`` appears by one rename, so it is whole or not there. The highest step is where a run
goes on; the best one by held-out accepted length is kept besides the last few.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dspark.drafters.checkpoint import save_drafter
from dspark.drafters.dspark import DSparkDrafter

__all__ = ["CheckpointDirectory", "write_json"]

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

    def save(
        self,
        step: int,
        drafter: DSparkDrafter,
        state: dict[str, Any],
        provenance: dict[str, Any],
        *,
        best_step: int | None,
    ) -> Path:
        """Write the checkpoint of ``step`` and drop what need not stay (never ``best_step``)."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in self._directory.glob(".*"):
            shutil.rmtree(leftover)
        temporary = self._directory / f".step-{step:06d}.{os.getpid()}"
        save_drafter(drafter, temporary, include_embeddings=False)
        torch.save({**state, "step": step}, temporary / _STATE_FILE)
        write_json(temporary / _PROVENANCE_FILE, {**provenance, "step": step})
        for path in temporary.iterdir():
            _sync(path)
        final = self.path(step)
        if final.exists():
            replaced = self._directory / f".old-{step:06d}.{os.getpid()}"
            os.rename(final, replaced)
            os.rename(temporary, final)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, final)
        _sync(self._directory)
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

    def remove_all(self) -> None:
        """Delete every checkpoint."""
        if self._directory.exists():
            shutil.rmtree(self._directory)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""``log.jsonl`` of a run: one line for every step, evaluation, start and end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.files import write_text

__all__ = ["RunLog"]

_FILE = "log.jsonl"


class RunLog:
    """The log of the run in one directory."""

    def __init__(self, directory: Path) -> None:
        """Nothing is written yet."""
        self._path = directory / _FILE

    def write(self, event: str, **values: Any) -> None:
        """Append a line.

        Raises:
            OSError: it could not be written, naming the file.
        """
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **values}) + "\n")
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._path} could not be written ({error.strerror}); make room, then run the same command: it goes "
                "on from the last checkpoint",
            ) from error

    def trim(self, step: int) -> None:
        """Drop what a killed run logged after ``step``: those steps will be done, and logged, again."""
        if not self._path.exists():
            return
        kept = []
        if step > 0:
            for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if line.endswith("\n") and entry.get("step", 0) <= step:
                    kept.append(line)
        write_text(self._path, "".join(kept))

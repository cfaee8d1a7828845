"""The peers' processes as the comparison sees them: started once, asked in turns, watched while they wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """A peer that runs on its own: loads at once, then does a job whenever it is asked.

    Args:
        log: where its stderr goes.

    Raises:
        RuntimeError: it could not start, with what it said.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self._log = name, list(command), log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self.facts: dict[str, Any] = self._receive()["facts"]
        except RuntimeError:
            self.close()
            raise

    def ask(self, job: str, **arguments: Any) -> Any:
        """Do a job and return its result.

        Raises:
            RuntimeError: it failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": job, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._receive()["result"]

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        content: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in content:
            raise RuntimeError(f"{self.name}: {content['error'].strip()}\nsee {self._log}")
        return content

    def cpu_seconds(self) -> float:
        """Processor time of it and its descendants so far."""
        return sum(sum(map(int, fields[11:13])) for fields in self._family()) / TICKS

    def resident_bytes(self) -> int:
        """Memory that it and its descendants hold; what they share counts for each."""
        return sum(int(fields[21]) for fields in self._family()) * PAGE

    def _family(self) -> list[list[str]]:
        """The fields of /proc/PID/stat behind the name, of each process."""
        stats = {pid: fields for pid in Path("/proc").glob("[0-9]*") if (fields := _stat(pid))}
        family = {str(self._process.pid)}
        found: list[list[str]] = []
        while new := [pid for pid, fields in stats.items() if pid.name in family or fields[1] in family]:
            found += [stats.pop(pid) for pid in new]
            family |= {pid.name for pid in new}
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            print(f"{self.name} does not end by itself: ended", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stat(pid: Path) -> list[str] | None:
    try:
        return (pid / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return None

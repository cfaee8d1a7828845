"""The rows on disk: append-only files that a kill at any moment leaves readable.

A directory holds ``rows-00000.jsonl``, ``rows-00001.jsonl``, ... and ``dropped.jsonl``. A line is written with one
system call, so a killed run leaves at most one torn line, at the end of a file; it is cut off when the run goes on.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspark.files import exclusive
from dspark.training.data.rows import DROPPED_FILE, SHARD_PATTERN, DataRow, DroppedRow

ROWS_PER_SHARD = 4096
SYNC_SECONDS = 5.0


@dataclass(kw_only=True)
class Tally:
    """Counts over the rows of a directory."""

    rows: int = 0
    total_tokens: int = 0
    response_tokens: int = 0
    rows_by_source: Counter[str] = field(default_factory=Counter)
    response_tokens_by_source: Counter[str] = field(default_factory=Counter)
    rows_by_temperature: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """Planned rows that need no more work: kept and dropped ones."""
        return self.rows + self.dropped.total()

    def add(self, row: DataRow | DroppedRow) -> None:
        """Count a row."""
        if isinstance(row, DroppedRow):
            self.dropped[row.reason] += 1
            return
        self.rows += 1
        self.total_tokens += len(row.token_ids)
        self.response_tokens += row.response_tokens
        self.rows_by_source[row.source] += 1
        self.response_tokens_by_source[row.source] += row.response_tokens
        self.rows_by_temperature[f"{row.temperature:g}"] += 1
        self.finish_reasons.update(row.finish_reasons)

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON values, keys in order."""
        return {
            "done": self.done,
            "rows": self.rows,
            "total_tokens": self.total_tokens,
            "response_tokens": self.response_tokens,
            "rows_by_source": dict(sorted(self.rows_by_source.items())),
            "response_tokens_by_source": dict(sorted(self.response_tokens_by_source.items())),
            "rows_by_temperature": dict(sorted(self.rows_by_temperature.items())),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "dropped": dict(sorted(self.dropped.items())),
        }


class RowStore:
    """Appends rows to a data directory, one writer at a time. A context manager.

    On opening, torn last lines are cut off and everything that is there is read: ``tally`` counts it, ``recovered``
    gives by row id the user turns and, for dropped rows, the reason.

    Raises ValueError for a line that cannot be read or a row that is there twice, and BlockingIOError when another
    process writes to the directory.
    """

    def __init__(self, directory: Path, *, rows_per_shard: int = ROWS_PER_SHARD) -> None:
        self.directory = directory
        self.tally = Tally()
        self.recovered: dict[str, tuple[tuple[str, ...], str | None]] = {}
        self.torn_lines = 0
        self._rows_per_shard = rows_per_shard
        self._synced_at = time.monotonic()
        self._shard_number, self._rows_in_shard = 0, 0
        with ExitStack() as on_failure:
            on_failure.enter_context(exclusive(directory))
            self._recover()
            self._dropped = _open_append(directory / DROPPED_FILE)
            self._shard = _open_append(self._shard_path())
            self._lock = on_failure.pop_all()

    def append(self, row: DataRow | DroppedRow) -> None:
        """Write a row as one line. Raises OSError when the disk is full; the rows before it are kept."""
        try:
            if isinstance(row, DroppedRow):
                _write_line(self._dropped, row.to_json())
            else:
                if self._rows_in_shard >= self._rows_per_shard:
                    os.fsync(self._shard)
                    self._shard_number, self._rows_in_shard = self._shard_number + 1, 0
                    following = _open_append(self._shard_path())
                    os.close(self._shard)
                    self._shard = following
                _write_line(self._shard, row.to_json())
                self._rows_in_shard += 1
        except OSError as error:
            raise self._write_error(error) from error
        self.tally.add(row)

    def sync_if_due(self) -> bool:
        """Put everything on the disk when the last time is ``SYNC_SECONDS`` ago; True when it was done."""
        if time.monotonic() - self._synced_at < SYNC_SECONDS:
            return False
        self.sync()
        return True

    def sync(self) -> None:
        """Wait until everything written is on the disk. Raises OSError when the disk is full."""
        try:
            os.fsync(self._shard)
            os.fsync(self._dropped)
        except OSError as error:
            raise self._write_error(error) from error
        self._synced_at = time.monotonic()

    def recount(self) -> None:
        """Read everything back from the disk, as on opening."""
        self.tally, self.recovered = Tally(), {}
        self._recover()

    def close(self) -> None:
        """Put everything on the disk and let another writer in."""
        try:
            self.sync()
        finally:
            os.close(self._shard)
            os.close(self._dropped)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self) -> None:
        shards = sorted(self.directory.glob(SHARD_PATTERN))
        rows_in_shard = 0
        for shard in shards:
            rows_in_shard = self._recover_file(shard, DataRow)
        self._recover_file(self.directory / DROPPED_FILE, DroppedRow)
        self._shard_number = int(shards[-1].stem.removeprefix("rows-")) if shards else 0
        self._rows_in_shard = rows_in_shard

    def _recover_file(self, file: Path, kind: type[DataRow] | type[DroppedRow]) -> int:
        if not file.exists():
            return 0
        end_of_last_line, count = 0, 0
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    break
                end_of_last_line += len(line)
                count += 1
                try:
                    row = kind.from_json(line)
                    if row.id in self.recovered:
                        raise ValueError(f"row {row.id} is there twice")
                except ValueError as error:
                    raise ValueError(
                        f"{file}, line {number}: {error}; take the line out, or take another directory"
                    ) from None
                self.recovered[row.id] = (row.user_turns, row.reason if isinstance(row, DroppedRow) else None)
                self.tally.add(row)
        if end_of_last_line != file.stat().st_size:
            os.truncate(file, end_of_last_line)
            self.torn_lines += 1
        return count

    def _write_error(self, error: OSError) -> OSError:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += ": make room there"
        return OSError(
            f"{self.directory} could not be written ({reason}); its {self.tally.done} finished rows are kept, and the "
            "same command goes on from there"
        )

    def _shard_path(self) -> Path:
        return self.directory / f"rows-{self._shard_number:05d}.jsonl"


def _open_append(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _write_line(descriptor: int, text: str) -> None:
    """Append a line; when the disk has no room for all of it, take what was written of it away again."""
    content = f"{text}\n".encode()
    before = os.fstat(descriptor).st_size
    try:
        while content:  # once, unless the disk is full or a signal cuts the call short
            content = content[os.write(descriptor, content) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise

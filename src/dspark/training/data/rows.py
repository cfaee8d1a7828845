"""Rows of regenerated data, and their JSONL form: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD_PATTERN = "rows-*.jsonl"
DROPPED_FILE = "dropped.jsonl"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """One conversation whose answers the target wrote.

    id: ``<source>/<number>``, the same in every run with the same settings.
    token_ids: the whole conversation, as the target saw and wrote it.
    response_spans: half-open ranges of ``token_ids``, one an answer: exactly the tokens that the target generated,
        its end-of-turn token included when it produced one. No token of the template is inside.
    finish_reasons: "stop" or "length", one an answer.
    temperature: temperature at which the answers were sampled (0 = greedy).
    user_turns: the user messages as text, for people and for checks against other prompts.
    """

    id: str
    source: str
    token_ids: tuple[int, ...]
    response_spans: tuple[tuple[int, int], ...]
    finish_reasons: tuple[str, ...]
    temperature: float
    user_turns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.response_spans:
            raise ValueError(f"response_spans of row {self.id} is empty: a row has at least one answer")
        if len(self.finish_reasons) != len(self.response_spans):
            raise ValueError(
                f"finish_reasons of row {self.id} has {len(self.finish_reasons)} entries "
                f"for {len(self.response_spans)} response_spans"
            )
        previous_end = 0
        for start, end in self.response_spans:
            if not previous_end <= start < end <= len(self.token_ids):
                raise ValueError(
                    f"response_spans of row {self.id} must be non-empty, in order, disjoint and inside its "
                    f"{len(self.token_ids)} tokens, got {[list(span) for span in self.response_spans]}"
                )
            previous_end = end
        if min(self.token_ids) < 0:
            raise ValueError(f"token_ids of row {self.id} has the negative id {min(self.token_ids)}")

    @property
    def response_tokens(self) -> int:
        """Number of generated tokens, i.e. of tokens that may be supervised."""
        return sum(end - start for start, end in self.response_spans)

    def to_json(self) -> str:
        """The row as one line, without the line break."""
        return json.dumps(
            {
                "id": self.id,
                "source": self.source,
                "token_ids": self.token_ids,
                "response_spans": self.response_spans,
                "finish_reasons": self.finish_reasons,
                "temperature": self.temperature,
                "user_turns": self.user_turns,
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> DataRow:
        """Read a line. Raises ValueError that names the field; fields it does not know are left aside."""
        record = parse_object(line)
        spans = _list(record, "response_spans")
        if not all(isinstance(span, list) and len(span) == 2 and all(_is_int(edge) for edge in span) for span in spans):
            raise ValueError("response_spans must be a list of [start, end] pairs of integers")
        token_ids = _list(record, "token_ids")
        if not all(_is_int(token) for token in token_ids):
            raise ValueError("token_ids must be a list of integers")
        temperature = record.get("temperature")
        if not isinstance(temperature, int | float) or isinstance(temperature, bool):
            raise ValueError("temperature must be a number")
        return cls(
            id=_string(record, "id"),
            source=_string(record, "source"),
            token_ids=tuple(token_ids),
            response_spans=tuple((span[0], span[1]) for span in spans),
            finish_reasons=_strings(record, "finish_reasons"),
            temperature=float(temperature),
            user_turns=_strings(record, "user_turns") if "user_turns" in record else (),
        )


@dataclass(frozen=True, kw_only=True)
class DroppedRow:
    """A planned row that gave no data, and why. Kept so that a resumed run does not do it again."""

    id: str
    source: str
    reason: str
    user_turns: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The record as one line, without the line break."""
        record = {"id": self.id, "source": self.source, "reason": self.reason, "user_turns": self.user_turns}
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> DroppedRow:
        """Read a line. Raises ValueError that names the field."""
        record = parse_object(line)
        return cls(
            id=_string(record, "id"),
            source=_string(record, "source"),
            reason=_string(record, "reason"),
            user_turns=_strings(record, "user_turns"),
        )


def iterate_rows(path: Path | str, *, vocab_size: int | None = None) -> Iterator[DataRow]:
    """Rows of a data directory (all its shards, in order) or of one JSONL file.

    A last line that a killed run left without its line break is skipped. Raises FileNotFoundError when there is nothing
    to read, and ValueError that names file, line and field (also for a token id outside ``vocab_size``), or the
    directory when it has fewer rows than its manifest counts or none at all.
    """
    path = Path(path)
    files = sorted(path.glob(SHARD_PATTERN)) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} has no {SHARD_PATTERN}; make some with `dspark data {path}`")
    count = 0
    for file in files:
        for number, line in _complete_lines(file):
            try:
                row = DataRow.from_json(line)
                if vocab_size is not None and max(row.token_ids) >= vocab_size:
                    raise ValueError(
                        f"token_ids has the id {max(row.token_ids)}, but the target's vocabulary has {vocab_size}; "
                        "was the data made with another target?"
                    )
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
            count += 1
            yield row
    counted = read_manifest(path).get("rows", 0) if (path / MANIFEST_FILE).is_file() else 0
    if isinstance(counted, int) and count < counted:
        raise ValueError(
            f"{path} has {count} rows, but its {MANIFEST_FILE} counts {counted}: a {SHARD_PATTERN} was cut short or "
            "taken away; the `dspark data` command that made it makes the missing rows again"
        )
    if not count:
        raise ValueError(f"{path} has no rows yet; make some with `dspark data`")


def read_rows(path: Path | str, *, vocab_size: int | None = None) -> list[DataRow]:
    """All rows of a data directory or JSONL file; see ``iterate_rows``."""
    return list(iterate_rows(path, vocab_size=vocab_size))


def read_manifest(directory: Path | str) -> dict[str, Any]:
    """The manifest of a data directory. Raises FileNotFoundError, or ValueError when it cannot be read."""
    file = Path(directory) / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("recipe"), dict):
        raise ValueError(f"{file} has no recipe")
    if not isinstance(manifest["recipe"].get("target", {}), dict):
        raise ValueError(f"{file}: recipe.target must be an object")
    return manifest


def _complete_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of each non-empty line that ends in a line break; a torn last line is left out."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.endswith(b"\n") and line.strip():
                yield number, line


def parse_object(line: str | bytes) -> dict[str, Any]:
    """A JSON object from a line. Raises ValueError for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, got {type(record).__name__}")
    return record


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list(record: dict[str, Any], field: str) -> list[Any]:
    value = record.get(field)
    if not isinstance(value, list):
        raise ValueError(f"{field} must be a list" if field in record else f"{field} is missing")
    return value


def _string(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string" if field in record else f"{field} is missing")
    return value


def _strings(record: dict[str, Any], field: str) -> tuple[str, ...]:
    values = _list(record, field)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{field} must be a list of strings")
    return tuple(values)

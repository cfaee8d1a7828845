"""What decoding gave, answer by answer, and the file that keeps it while an evaluation runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dspark.evaluation.rounds import RoundRecord
from dspark.files import exclusive, remove_leftovers, write_json

__all__ = ["Answer", "AnswerLog", "Record", "Timing"]

_SETTINGS_FILE = "settings.json"
_ANSWERS_FILE = "answers.jsonl"
_SESSIONS_FILE = "sessions.json"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one answer: all of it, and the parts that were measured."""

    total: float
    prefill: float
    draft: float = 0.0
    schedule: float = 0.0
    verify: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer and how it came about.

    Attributes:
        token_ids: generated tokens, a stop token included. The first comes out of the prompt's own pass, the others
            out of ``rounds``.
        text: what the conversation goes on with.
        rounds: every target pass after the prompt's, also those without a draft.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    timing: Timing
    rounds: tuple[RoundRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of the log: the answer of one arm to one turn, or why there is none."""

    arm: str
    prompt_id: str
    turn: int
    answer: Answer | None = None
    skipped: str | None = None

    def to_json(self) -> str:
        """The record as one line, without the line break; rounds are lists of numbers."""
        place: dict[str, Any] = {"arm": self.arm, "prompt": self.prompt_id, "turn": self.turn}
        if self.answer is None:
            return json.dumps(place | {"skipped": self.skipped}, ensure_ascii=False)
        answer = self.answer
        return json.dumps(
            place
            | {
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "seconds": vars(answer.timing),
                "temperature": answer.rounds[0].sampling_temperature if answer.rounds else None,
                "rounds": [
                    [r.drafted, r.verified, r.judged, r.accepted, r.committed, r.confidence_logits]
                    for r in answer.rounds
                ],
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read a line that :meth:`to_json` wrote. Raises ValueError for anything else."""
        try:
            content = json.loads(line)
            place = {"arm": content["arm"], "prompt_id": content["prompt"], "turn": content["turn"]}
            if "skipped" in content:
                return cls(**place, skipped=content["skipped"])
            rounds = tuple(
                RoundRecord(
                    prompt_id=content["prompt"],
                    drafted=drafted,
                    verified=verified,
                    judged=judged,
                    accepted=accepted,
                    committed=committed,
                    confidence_logits=None if logits is None else tuple(logits),
                    sampling_temperature=content["temperature"],
                )
                for drafted, verified, judged, accepted, committed, logits in content["rounds"]
            )
            answer = Answer(
                text=content["text"],
                token_ids=tuple(content["token_ids"]),
                finish_reason=content["finish_reason"],
                prompt_tokens=content["prompt_tokens"],
                timing=Timing(**content["seconds"]),
                rounds=rounds,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not an answer's record ({type(error).__name__}: {error})") from None
        return cls(**place, answer=answer)


class AnswerLog:
    """The records of an evaluation: in memory, and in a directory if there is one."""

    def __init__(self) -> None:
        """An empty log that nothing on disk keeps; see :meth:`opened`."""
        self._records: dict[tuple[str, str, int], Record] = {}
        self._path: Path | None = None
        self._sessions: list[dict[str, Any]] = []

    @classmethod
    @contextmanager
    def opened(cls, directory: Path | None, settings: Mapping[str, Any]) -> Iterator[Self]:
        """The log in ``directory``, with the records of an earlier run of the same settings; None keeps nothing.

        Raises:
            ValueError: the directory holds an evaluation of other settings (naming them), or a damaged record.
            BlockingIOError: another process writes there.
        """
        log = cls()
        if directory is None:
            yield log
            return
        with exclusive(directory):
            remove_leftovers(directory)
            _check_settings(directory / _SETTINGS_FILE, settings)
            log._read(directory / _ANSWERS_FILE)
            yield log

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in the order in which they were made."""
        return tuple(self._records.values())

    @property
    def sessions(self) -> tuple[Mapping[str, Any], ...]:
        """Provenance of every process that answered something, in order."""
        return tuple(self._sessions)

    def start_session(self, provenance: Mapping[str, Any]) -> None:
        """Note who is about to answer."""
        self._sessions.append(dict(provenance))
        if self._path is not None:
            write_json(self._path.with_name(_SESSIONS_FILE), self._sessions)

    def get(self, arm: str, prompt_id: str, turn: int) -> Record | None:
        """The record of an answer that was given before."""
        return self._records.get((arm, prompt_id, turn))

    def add(self, record: Record) -> None:
        """Keep a record. Raises OSError that names the file when it cannot be written."""
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(record.to_json() + "\n")
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{self._path} could not be written ({error.strerror}); make room, then run the same command: it "
                    "goes on after the last answer",
                ) from error
        self._records[record.arm, record.prompt_id, record.turn] = record

    def _read(self, path: Path) -> None:
        self._path = path
        sessions = path.with_name(_SESSIONS_FILE)
        if sessions.exists():
            self._sessions = json.loads(sessions.read_text(encoding="utf-8"))
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a kill tore the last line: that answer is given again
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], start=1):
            try:
                record = Record.from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}; delete the line to answer it again") from None
            self._records[record.arm, record.prompt_id, record.turn] = record


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    wanted = json.loads(json.dumps(settings))
    if not path.exists():
        write_json(path, wanted)
        return
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): take another directory") from None
    changed = [key for key in wanted.keys() | found.keys() if found.get(key) != wanted.get(key)]
    if changed:
        raise ValueError(
            f"{path.parent} holds an evaluation with other settings ({', '.join(sorted(changed))}): give the same ones "
            "to go on with it, or another directory"
        )

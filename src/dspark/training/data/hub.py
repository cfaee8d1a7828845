"""Prompts of a data set on the Hugging Face hub, streamed through the package ``datasets`` (the extra ``hub``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dspark.training.data.conversations import Conversation, conversation_from_messages, conversation_from_turns

PREFIX = "hub:"
#: Columns that hold prompts, the first that a data set has is taken.
PROMPT_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "question", "instruction")
#: Rows read from the front of a split.
MAX_ROWS = 50_000

_FORM = "hub:OWNER/NAME[/SUBSET][:SPLIT][:COLUMN]"
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Which part of which data set: ``hub:owner/name``, ``hub:owner/name/subset:split:column``."""

    name: str
    subset: str | None = None
    split: str = "train"
    column: str | None = None

    @classmethod
    def parse(cls, spec: str) -> Self:
        """Read the command-line form. Raises ValueError that shows it."""
        place, *rest = spec.removeprefix(PREFIX).split(":")
        match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?", place)
        if match is None or len(rest) > 2 or not all(rest):
            raise ValueError(f"{spec} does not name a data set of the hub; the form is {_FORM}")
        split = rest[0] if rest else "train"
        return cls(name=match[1], subset=match[2], split=split, column=rest[1] if len(rest) > 1 else None)

    def __str__(self) -> str:
        subset = f"/{self.subset}" if self.subset else ""
        return f"{PREFIX}{self.name}{subset}:{self.split}" + (f":{self.column}" if self.column else "")


@dataclass(frozen=True, kw_only=True)
class HubPrompts:
    """What was read: the conversations, the column they are from, and how many rows had nothing usable."""

    conversations: tuple[Conversation, ...]
    column: str
    unusable: int


def read_hub(dataset: HubDataset, *, max_rows: int = MAX_ROWS) -> HubPrompts:
    """Read the first ``max_rows`` rows of a split.

    Rows whose prompt cannot be used (empty, or with messages that do not take turns) are counted and left out.

    Raises OSError when the data set cannot be reached, and ValueError when ``datasets`` is not installed, for a subset,
    split or column that the data set does not have, or when no row can be used.
    """
    rows = _stream(dataset)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{dataset} has no rows")
    column = prompt_column(list(first), dataset)
    return parse_rows(itertools.islice(itertools.chain([first], rows), max_rows), column=column, dataset=dataset)


def prompt_column(columns: Sequence[str], dataset: HubDataset) -> str:
    """The column that holds the prompts. Raises ValueError that lists the columns."""
    if dataset.column is not None:
        if dataset.column not in columns:
            raise ValueError(f"{dataset} has no column {dataset.column}; its columns are {', '.join(columns)}")
        return dataset.column
    for column in PROMPT_COLUMNS:
        if column in columns:
            return column
    raise ValueError(
        f"{dataset} has none of the columns {', '.join(PROMPT_COLUMNS)}; its columns are {', '.join(columns)}: "
        f"name the one with the prompts, as in {PREFIX}{dataset.name}:{dataset.split}:COLUMN"
    )


def parse_rows(rows: Iterable[Mapping[str, Any]], *, column: str, dataset: HubDataset) -> HubPrompts:
    """Conversations of rows. Raises ValueError with the first reason when none can be used."""
    conversations: list[Conversation] = []
    unusable, first_reason = 0, ""
    for row in rows:
        try:
            conversations.append(_conversation(row, column))
        except ValueError as error:
            unusable += 1
            first_reason = first_reason or str(error)
    if not conversations:
        raise ValueError(f"{dataset}: none of its {unusable} rows can be used; of the first, {first_reason}")
    return HubPrompts(conversations=tuple(conversations), column=column, unusable=unusable)


def _conversation(row: Mapping[str, Any], column: str) -> Conversation:
    value = row[column]
    if isinstance(value, str):
        further = row.get("input") if column == "instruction" else None  # Alpaca's form
        text = f"{value}\n\n{further}" if isinstance(further, str) and further.strip() else value
        return conversation_from_turns([text], field=column)
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return conversation_from_messages([_message(message) for message in value], field=column)
    if column == "turns":
        return conversation_from_turns(value, field=column)
    raise ValueError(f"{column} must be a text or a list of messages, got {type(value).__name__}")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of either of the two common forms, role and content or from and value."""
    role = message.get("role", message.get("from"))
    return {
        "role": _ROLES.get(role, role) if isinstance(role, str) else role,
        "content": message.get("content", message.get("value")),
    }


def _stream(dataset: HubDataset) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{dataset} needs the package `datasets` ({error}); install it with `pip install 'dspark[hub]'`, "
            "or give the prompts as a JSONL file"
        ) from None
    try:
        stream = datasets.load_dataset(dataset.name, dataset.subset, split=dataset.split, streaming=True)
    except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        # Subsets and splits that are not there are listed by the message; so is what is wrong with the name.
        raise ValueError(f"{dataset} cannot be opened: {_reason(error)}; the form is {_FORM}") from error
    except Exception as error:  # of the connection, by whichever library makes it
        raise OSError(
            f"{dataset} could not be reached ({_reason(error)}); check the network, or give a JSONL file"
        ) from error
    try:
        yield from stream
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{dataset} cannot be read, its files do not fit together: {_reason(error)}") from error
    except Exception as error:  # the connection may break in the middle
        raise OSError(
            f"{dataset} could not be read to the end ({_reason(error)}); the same command tries again"
        ) from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

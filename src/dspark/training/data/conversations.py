"""The given part of conversations, as it comes from outside: files and records of several forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.training.data.rows import parse_object

LINE_EXAMPLE = '{"turns": ["What is 2 + 2?"]}'


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The given part of a conversation: an optional system message and the user's messages in order.

    domain: what the prompt is about, where its file says so.
    """

    user_turns: tuple[str, ...]
    system: str | None = None
    domain: str = ""


def read_conversations(path: Path | str) -> Iterator[Conversation]:
    """Conversations of a JSONL file, one a line.

    A line is ``{"turns": [user message, ...]}`` or ``{"messages": [{"role": ..., "content": ...}, ...]}``. Of messages,
    a first system message and the user messages are taken; assistant messages are left out, since the target writes
    every answer. Other fields are left aside, except ``domain``. Raises OSError when the file cannot be opened, and
    ValueError that names file, line and field, also for a file without a prompt.
    """
    path = Path(path)
    empty = True
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            empty = False
            try:
                yield _from_record(parse_object(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}; a line is an object like {LINE_EXAMPLE}") from None
    if empty:
        raise ValueError(f"{path}: no prompt in it; a line is an object like {LINE_EXAMPLE}")


def conversation_from_turns(turns: object, *, field: str = "turns") -> Conversation:
    """A conversation from a list of user messages. Raises ValueError that names ``field``."""
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{field} must be a list of at least one non-empty user message")
    for index, turn in enumerate(turns):
        _check_text(turn, f"{field}[{index}]")
    return Conversation(user_turns=tuple(turns))


def conversation_from_messages(messages: object, *, field: str = "messages") -> Conversation:
    """The given part of a list of ``{"role", "content"}`` objects. Raises ValueError that names ``field``."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{field} must be a list of objects with role and content")
    system: str | None = None
    user_turns: list[str] = []
    previous = ""
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            raise ValueError(f"{field}[{index}].content must be a string")
        _check_text(content, f"{field}[{index}].content")
        if role == "system" and index == 0:
            system = content
        elif role == "user" and previous != "user" and content.strip():
            user_turns.append(content)
        elif role != "assistant" or previous != "user":
            raise ValueError(
                f"{field}[{index}].role is {role!r} after {previous or 'nothing'!r}: an optional system message comes "
                "first, then non-empty user messages and assistant messages take turns"
            )
        previous = role
    if not user_turns:
        raise ValueError(f"{field} has no user message")
    return Conversation(user_turns=tuple(user_turns), system=system)


def _check_text(text: str, field: str) -> None:
    """Raise ValueError for half a character, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} holds {text[error.start]!a}, which is half a character; take it out") from None


def _from_record(record: dict[str, Any]) -> Conversation:
    if "turns" in record:
        conversation = conversation_from_turns(record["turns"])
    elif "messages" in record:
        conversation = conversation_from_messages(record["messages"])
    else:
        raise ValueError('has neither "turns" nor "messages"')
    domain = record.get("domain")
    if domain is None:
        return conversation
    if not isinstance(domain, str):
        raise ValueError("domain must be a string")
    return Conversation(user_turns=conversation.user_turns, system=conversation.system, domain=domain)

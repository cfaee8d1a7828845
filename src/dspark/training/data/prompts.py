"""Where prompts come from: the target itself, steered by system prompts, or a JSONL file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.training.data.rows import complete_lines, parse_object
from dspark.training.data.steering import SteeringPrompt, built_in_steering


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The given part of a conversation: an optional system message and the user's messages in order."""

    user_turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True, kw_only=True)
class SelfPrompts:
    """User turns that the target writes itself under one of ``steering``, drawn by weight. Never runs out."""

    name: str
    steering: tuple[SteeringPrompt, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.steering:
            raise ValueError(f"source {self.name} needs at least one steering prompt")
        _check_source(self.name, self.share)

    @property
    def size(self) -> int | None:
        """Number of prompts; None: as many as wanted."""
        return None

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""
        content = json.dumps([asdict(prompt) for prompt in self.steering])
        return {"name": self.name, "kind": "self", "share": self.share, "sha256": _sha256(content.encode())}

    def pick(self, fraction: float) -> SteeringPrompt:
        """The steering prompt at ``fraction`` in [0, 1) of the cumulated weights."""
        remaining = fraction * sum(prompt.weight for prompt in self.steering)
        for prompt in self.steering:
            remaining -= prompt.weight
            if remaining < 0:
                return prompt
        return self.steering[-1]


@dataclass(frozen=True, kw_only=True)
class FilePrompts:
    """Conversations of a JSONL file; see ``read_conversations`` for its form."""

    name: str
    conversations: tuple[Conversation, ...]
    sha256: str
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.conversations:
            raise ValueError(f"source {self.name} has no prompts")
        _check_source(self.name, self.share)

    @property
    def size(self) -> int | None:
        """Number of prompts."""
        return len(self.conversations)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""
        return {
            "name": self.name,
            "kind": "file",
            "share": self.share,
            "sha256": self.sha256,
            "prompts": len(self.conversations),
        }


PromptSource = SelfPrompts | FilePrompts


def parse_sources(specs: Sequence[str]) -> list[PromptSource]:
    """Sources from their command-line form.

    ``self`` (all domains of the built-in system prompts, in equal parts), ``self-math`` and the like (one domain), or
    the path of a JSONL file; each may be followed by ``=SHARE``, its part of the rows relative to the others
    (default 1). Raises ValueError or FileNotFoundError that names the spec.
    """
    sources: list[PromptSource] = []
    for spec in specs:
        place, share = _split_share(spec)
        if place == "self":
            sources += self_prompt_sources(share=share)
        elif place.startswith("self-") and not Path(place).exists():
            sources += self_prompt_sources([place.removeprefix("self-")], share=share)
        else:
            sources.append(file_prompts(Path(place), share=share))
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two sources are called {name}; rename one of the files")
    return sources


def self_prompt_sources(domains: Sequence[str] | None = None, *, share: float = 1.0) -> list[SelfPrompts]:
    """Built-in self-prompting sources, ``self-<domain>``, that have ``share`` together."""
    steering = built_in_steering()
    chosen = list(steering) if domains is None else list(domains)
    for domain in chosen:
        if domain not in steering:
            known = ", ".join(f"self-{name}" for name in steering)
            raise ValueError(f"there is no source self-{domain}; there are self, {known}")
    return [
        SelfPrompts(
            name=f"self-{domain}",
            steering=steering[domain],
            share=share / len(chosen),
        )
        for domain in chosen
    ]


def file_prompts(path: Path | str, *, name: str | None = None, share: float = 1.0) -> FilePrompts:
    """The prompts of a JSONL file as a source, called after the file unless ``name`` is given."""
    path = Path(path)
    return FilePrompts(
        name=path.name.removesuffix(".jsonl") if name is None else name,
        conversations=tuple(read_conversations(path)),
        sha256=_sha256(path.read_bytes()),
        share=share,
    )


def read_conversations(path: Path | str) -> Iterator[Conversation]:
    """Conversations of a JSONL file, one a line.

    A line is ``{"turns": [user message, ...]}`` or ``{"messages": [{"role": ..., "content": ...}, ...]}``. Of messages,
    a first system message and the user messages are taken; assistant messages are left out, since the target writes
    every answer. Other fields are left aside. Raises ValueError that names file, line and field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}; give a JSONL file, or `self` to self-prompt")
    last_line_is_complete = path.read_bytes().endswith(b"\n")
    lines = complete_lines(path) if last_line_is_complete else enumerate(path.read_bytes().split(b"\n"), start=1)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield _conversation(parse_object(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def _conversation(record: dict[str, Any]) -> Conversation:
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise ValueError("turns must be a list of at least one non-empty user message")
        return Conversation(user_turns=tuple(turns))
    if "messages" not in record:
        raise ValueError('has neither "turns" nor "messages"')
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects with role and content")
    system: str | None = None
    user_turns: list[str] = []
    previous = ""
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str):
            raise ValueError(f"messages[{index}].content must be a string")
        if role == "system" and index == 0:
            system = content
        elif role == "user" and previous != "user" and content.strip():
            user_turns.append(content)
        elif role != "assistant" or previous != "user":
            raise ValueError(
                f"messages[{index}].role is {role!r} after {previous or 'nothing'!r}: an optional system message comes "
                "first, then non-empty user messages and assistant messages take turns"
            )
        previous = role
    if not user_turns:
        raise ValueError("messages has no user message")
    return Conversation(user_turns=tuple(user_turns), system=system)


def _split_share(spec: str) -> tuple[str, float]:
    place, separator, share = spec.rpartition("=")
    if not separator or Path(spec).exists():
        return spec, 1.0
    try:
        return place, float(share)
    except ValueError:
        return spec, 1.0


def _check_source(name: str, share: float) -> None:
    if not name or "/" in name:
        raise ValueError(f"the name of a source must be non-empty and without '/', got {name!r}")
    if not share > 0:
        raise ValueError(f"the share of source {name} must be positive, got {share}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

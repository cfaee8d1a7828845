"""Prompts as they come from outside: files of conversations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation to be answered: what the user says in each turn, under a system message or none."""

    turns: tuple[str, ...]
    system: str | None = None
    domain: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSONL file of prompts, in the form that training data takes them (``read_conversations``).

    Raises OSError when the file cannot be opened, and ValueError naming the file and line of what cannot be read, or
    the file when it holds no prompt.
    """
    from dspark.training.data.conversations import read_conversations

    return [
        Prompt(turns=conversation.user_turns, system=conversation.system, domain=conversation.domain)
        for conversation in read_conversations(path)
    ]

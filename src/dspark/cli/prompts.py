"""Prompts as they come from outside: files of conversations, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def chat_token_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the target's own chat format, up to where its next answer begins.

    Raises ValueError for a tokenizer without a chat template, or with one that refuses the conversation.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template: use --raw to continue the prompt as plain text")
    try:
        return list(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the target's chat template refuses the roles {roles}: {error}") from error


def raw_token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text, with the special tokens that the tokenizer puts around any text."""
    return list(tokenizer(text)["input_ids"])

"""Prompts as they come from outside: files of conversations, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Prompt(BaseModel):
    """One conversation: what the user says in each turn. A file's further fields are kept aside, except ``domain``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    turns: tuple[str, ...] = Field(min_length=1)
    domain: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSONL file of ``{"turns": [...]}`` lines.

    Raises ValueError naming the file and line of what cannot be read, or the file when it holds no prompt.
    """
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompts.append(Prompt.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"])
                raise ValueError(
                    f"{path}, line {number}: {field + ': ' if field else ''}{first['msg']}; "
                    'a line is an object like {"turns": ["What is 2 + 2?"]}'
                ) from None
    if not prompts:
        raise ValueError(f'{path}: no prompt in it; a line is an object like {{"turns": ["What is 2 + 2?"]}}')
    return prompts


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

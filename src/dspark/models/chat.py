"""Conversations and texts as a target's token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def chat_token_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in the target's own chat format, up to where its next answer begins.

    Args:
        tokenizer: the target's.
        messages: ``{"role": ..., "content": ...}`` each.

    Raises:
        ValueError: the tokenizer has no chat template, or one that refuses the conversation.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: continue the prompt as plain text (--raw, or prompt=)"
        )
    try:
        return list(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the target's chat template refuses the roles {roles}: {error}") from error


def text_token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text, with the special tokens that the tokenizer puts around any text."""
    return list(tokenizer(text)["input_ids"])

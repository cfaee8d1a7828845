"""Conversations as token ids, so that it is exactly known which tokens the target wrote.

A conversation grows by appending: the template's text up to the point where the assistant speaks, the ids that the
target generated (kept as they are, never decoded and tokenised again), the template's text up to the next answer, and
so on. What the template writes is found by rendering with a sentinel where the content goes, and cutting there, so any
chat template works that puts contents into the text unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from dspark.training.data.identity import IdentifiedTokenizer, template_sha256, tokenizer_sha256

_SENTINEL = "DSPARK0SENTINEL0CONTENT"

Message = Mapping[str, str]


class ChatTokenizer(IdentifiedTokenizer, Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class ChatFormat:
    """A tokenizer's chat template, as token ids.

    stop_token_ids: tokens that end an answer besides the tokenizer's eos and the one that the template writes there.

    Raises ValueError when the tokenizer has no chat template, or one that cannot be cut at a message's content.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, stop_token_ids: Iterable[int] = ()) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat_template; take an instruction-tuned target, or set one on it")
        self._tokenizer = tokenizer
        self.special_token_ids = frozenset(int(token) for token in tokenizer.all_special_ids)
        user = {"role": "user", "content": "Hi"}
        after_user = self._around_sentinel([], {"role": "user", "content": _SENTINEL}, [])[1]
        after_answer = self._around_sentinel([user], {"role": "assistant", "content": _SENTINEL}, [])[1]
        self.end_of_user_turn_ids = frozenset(self._leading_special(after_user))
        written_end = self._leading_special(after_answer)
        end_of_answer = {*stop_token_ids, *written_end}
        if tokenizer.eos_token_id is not None:
            end_of_answer.add(int(tokenizer.eos_token_id))
        if not end_of_answer:
            raise ValueError(
                "nothing ends an answer: the tokenizer has no eos_token and its chat_template writes no special token "
                "after an assistant message"
            )
        #: Tokens that end an answer.
        self.stop_token_ids = frozenset(end_of_answer)
        eos = min(end_of_answer) if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
        #: The one of them that the template writes there, or else the tokenizer's eos.
        self.end_of_answer_id = written_end[0] if written_end else eos

    @property
    def template_hash(self) -> str:
        """SHA-256 of the chat template, in hexadecimal."""
        return template_sha256(self._tokenizer)

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of the tokenizer's vocabulary, in hexadecimal."""
        return tokenizer_sha256(self._tokenizer)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Ids of template text; nothing is added to it."""
        return tuple(int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def answer_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation up to where the assistant speaks."""
        return self.tokenize(self._render(messages, add_generation_prompt=True))

    def open_user_turn(self, system: str, opener: str = "") -> tuple[int, ...]:
        """Ids up to where the user speaks, under a system message: the target then writes the user's message.

        opener: first words of the user's message, after which the target goes on.

        Raises ValueError when the template takes no system message, or does not end a user turn with a special token
        (the target's user turn could then not be told to have ended).
        """
        if not self.end_of_user_turn_ids:
            raise ValueError(
                "the chat_template writes no special token after a user message, so a user turn written by the target "
                "would have no end; use prompts from a JSONL file instead of self-prompting"
            )
        messages = [{"role": "system", "content": system}]
        try:
            before, _ = self._around_sentinel(messages, {"role": "user", "content": _SENTINEL}, [])
        except ValueError as error:
            raise ValueError(
                f"{error}; user turns are steered by a system message, so with this template take prompts from a JSONL "
                "file instead of self-prompting"
            ) from error
        if system not in before:
            raise ValueError(
                "the chat_template leaves the system message out, so user turns cannot be steered; "
                "use prompts from a JSONL file instead of self-prompting"
            )
        return self.tokenize(before + opener)

    def check_system_role(self) -> None:
        """Raise ValueError when the template refuses a system message, or leaves it out without a word."""
        conversation = [{"role": "system", "content": _SENTINEL}, {"role": "user", "content": "Hi"}]
        if _SENTINEL not in self._render(conversation, add_generation_prompt=True):
            raise ValueError("the chat_template leaves the system message out")

    def next_answer_prompt(self, messages: Sequence[Message], user_turn: str, last_token: int) -> tuple[int, ...]:
        """Ids that the template puts between an answer and the next one.

        messages: the conversation up to and including the user turn before the answer.
        user_turn: the user's next message.
        last_token: last id of the generated answer. When the answer ended itself with the token that the template
            would write there, that token is not repeated.

        Raises ValueError when the template writes the earlier turns differently once the conversation goes on.
        """
        answer = {"role": "assistant", "content": _SENTINEL}
        before, after = self._around_sentinel(messages, answer, [{"role": "user", "content": user_turn}])
        if before != self._render(messages, add_generation_prompt=True):
            raise ValueError(
                "the chat_template writes earlier turns differently once the conversation goes on, so answers of "
                "several turns cannot be kept as generated; use prompts with one user turn"
            )
        ids = self.tokenize(after)
        return ids[1:] if ids and ids[0] == last_token else ids

    def _leading_special(self, text: str) -> tuple[int, ...]:
        first = self.tokenize(text)[:1]
        return first if first and first[0] in self.special_token_ids else ()

    def _around_sentinel(
        self, before: Sequence[Message], message: Message, after: Sequence[Message]
    ) -> tuple[str, str]:
        text = self._render([*before, message, *after], add_generation_prompt=bool(after))
        parts = text.split(_SENTINEL)
        if len(parts) != 2:
            raise ValueError(
                f"the chat_template writes the content of a {message['role']} message {len(parts) - 1} times instead "
                "of once, so it is not known where that message begins and ends; regeneration needs another template"
            )
        return parts[0], parts[1]

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template raises whatever it likes (jinja2.TemplateError, TypeError, ...)
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat_template refuses a conversation with the roles {roles}: {error}") from error
        return str(text)

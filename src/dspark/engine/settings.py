"""What an engine may use, and take on."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.engine.request import check_whole_number

__all__ = ["EngineSettings"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine may use.

    Attributes:
        max_concurrency: choices decoded at once.
        max_length: prompt and generated tokens of a choice at most; None for as much as context and memory let.
        kv_memory_bytes: for keys, values and waiting features of target and drafter; None for ``max_concurrency``
            choices of ``max_length``, or 1 GiB if that is None, too.
        max_prefill_tokens: prompt tokens of a step at most, so that long prompts do not hold up those who decode.
        max_waiting: requests that may wait before more are refused.
        max_choices: answers that a request may ask for.
        reuse_prefixes: whether what was computed of earlier prompts and answers serves later prompts.

    Raises:
        ValueError: naming the field.
    """

    max_concurrency: int = 32
    max_length: int | None = None
    kv_memory_bytes: int | None = None
    max_prefill_tokens: int = 256
    max_waiting: int = 1024
    max_choices: int = 128
    reuse_prefixes: bool = True

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "max_prefill_tokens", "max_waiting", "max_choices"):
            check_whole_number(name, getattr(self, name), least=1)
        if self.max_length is not None:
            check_whole_number("max_length", self.max_length, least=2)  # a prompt and an answer
        if self.kv_memory_bytes is not None:
            check_whole_number("kv_memory_bytes", self.kv_memory_bytes, least=1)

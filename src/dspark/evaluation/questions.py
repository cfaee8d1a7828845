"""What is asked of a target when its answers are measured, one conversation at a time or many."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from dspark.decoding.settings import SamplingSettings
from dspark.evaluation.answers import Answer

__all__ = ["Conversation", "DoesNotFit", "Question"]


class DoesNotFit(ValueError):
    """A conversation has no room for an answer in the target's context; says how much there is."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One answer that is asked for.

    Attributes:
        messages: the conversation so far, ``{"role", "content"}`` each, a user's message last.
        random: uniforms in [0, 1), for sampling without a seed. They are the question's own: what is asked beside it
            changes nothing.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    sampling: SamplingSettings
    random: Callable[[], float]


Conversation = Generator[Question, Answer, None]
"""Yields its questions one after the other and is sent the answer of each; `DoesNotFit` is thrown into it instead."""

"""What a user asks of the engine, and what comes back: deltas while it runs, completions at the end."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Set
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, SupportsIndex

from dspark.decoding import SamplingSettings
from dspark.engine.grammar import Grammar
from dspark.scheduling import parse_own_policy

FinishReason = Literal["stop", "length", "cancelled"]
"""``stop``: a stop token or stop string. ``length``: ``max_tokens``, or the end of the context."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Continue ``prompt_ids`` in ``n`` ways. Nothing here changes what another request gets.

    Attributes:
        prompt_ids: at least one token.
        sampling: how tokens are drawn. With a seed, choice i draws with seed + i.
        max_tokens: generated tokens of a choice at most; the context may end it before.
        stop_token_ids: tokens that end a choice (kept in ``token_ids``, not shown in the text).
        stop_strings: texts that end a choice and are not shown; they need a tokenizer.
        n: choices.
        logprobs: None for none, 0 for the log-probability of each token, k for the k most likely tokens besides. They
            are the target's own, before temperature, penalties, truncation and grammar.
        prompt_logprobs: the same for the prompt's tokens but the first. Nothing computed before is then reused.
        grammar: what the answer may be. The target's stop tokens end it, also where ``stop_token_ids`` has others.
        max_draft_tokens: draft tokens of a round at most; None for the drafter's block, 0 for no speculation.
        policy: what this request's drafts go by, in place of the engine's policy: ``off``, ``fixed:K`` or
            ``threshold:C``.
        user: requests of different users take turns.
        prefix_namespace: computed prompts are reused between requests of one namespace only.
        random: uniforms in [0, 1) for sampling without a seed; operating-system entropy by default.

    Raises:
        ValueError: naming the field.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    max_draft_tokens: int | None = None
    policy: str | None = None
    user: str = ""
    prefix_namespace: str = ""
    random: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids))
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty: give at least one token (or use the chat template)")
        if not isinstance(self.sampling, SamplingSettings):
            raise ValueError(f"sampling is {self.sampling!r}; give SamplingSettings")
        check_whole_number("max_tokens", self.max_tokens, least=1)
        check_whole_number("n", self.n, least=1)
        for name in ("logprobs", "prompt_logprobs", "max_draft_tokens"):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name), least=0)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar is {self.grammar!r}; give one that a GrammarCompiler made (Engine.grammars)")
        if not isinstance(self.stop_token_ids, Set) or not all(isinstance(token, int) for token in self.stop_token_ids):
            raise ValueError("stop_token_ids must be a set of token ids")
        if not isinstance(self.stop_strings, tuple) or not all(
            isinstance(text, str) and text for text in self.stop_strings
        ):
            raise ValueError("stop_strings must be a tuple of texts that are not empty")
        if self.policy is not None:
            parse_own_policy(self.policy)
        for name in ("user", "prefix_namespace"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a text")
        if self.random is not None and not callable(self.random):
            raise ValueError("random must be a function that gives numbers in [0, 1)")


def token_ids(values: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """A prompt's tokens as plain integers, whatever kind of integers and sequence they come in.

    Raises:
        ValueError: they are no integers.
    """
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise ValueError("prompt_ids must be token ids, whole numbers (a text goes through the tokenizer)") from None


def check_whole_number(name: str, value: object, *, least: int) -> None:
    """Raise ValueError, naming it, unless it is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of the target's probability of a token, and of the most likely ones there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a step added to one choice. ``text`` is what became safe to show; it can lag behind the tokens.

    ``finish_reason`` is set in a choice's last delta.
    """

    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class SpeculationCounts:
    """Draft tokens of one choice, by what became of them.

    Attributes:
        rounds: steps that could have drafted; a token that came out of a prompt's own pass belongs to none.
        drafted, verified, accepted: draft tokens proposed, sent to the target, committed.
        committed: tokens that rounds gave, corrections and bonus tokens included.
        accepted_per_position, reached_per_position, verified_per_position: rounds, for draft position 1, 2, ..., in
            which the token was accepted / was verified and all before it were accepted / was verified. Tokens behind
            the one that ended the answer are in none.
    """

    rounds: int
    drafted: int
    verified: int
    accepted: int
    committed: int
    accepted_per_position: tuple[int, ...]
    reached_per_position: tuple[int, ...]
    verified_per_position: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """Committed tokens a round, bonus and correction included; 0 without a round."""
        return self.committed / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished choice."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    counts: SpeculationCounts


@dataclass(frozen=True, kw_only=True)
class RequestResult:
    """A finished request.

    Attributes:
        completions: by choice.
        reused_tokens: prompt tokens of the first choice whose keys and values were there already.
        queue_seconds: from submission to the first pass.
        first_token_seconds: from submission to the first token; None if there was none.
        seconds: from submission to the end.
        preemptions: times that a choice lost its memory to older requests and was computed again.
        prompt_logprobs: of the prompt's tokens from the second on, if asked for; fewer if it was cancelled before.
    """

    request_id: int
    completions: tuple[Completion, ...]
    prompt_tokens: int
    reused_tokens: int
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float
    preemptions: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields, ready for ``json.dumps``."""
        return asdict(self)

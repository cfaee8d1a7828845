"""Structured output: what an answer may be, as a mask of the tokens that may come next (llguidance)."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import llguidance.hf
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from transformers import PreTrainedTokenizerBase

from dspark.engine.grammar_trial import LIMITS, trial_failure

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "GrammarSource", "GrammarState"]

_MOST_CHARACTERS = 2**16
_MOST_CACHED = 256
_REFUSED_SECONDS = 60.0  # for which a refusal stands: one for want of time may be the machine's fault
_MOST_SECONDS = 0.25  # of a processor, for a mask, while others wait
# Between the parts of a JSON text: one blank, or a new line that is indented. More lets small models write it for ever.
_WHITESPACE = r"( |\n[ \t]{0,20})"


class GrammarError(ValueError):
    """The grammar of an answer lets it go no further: a limit of time or memory, or no token is left."""


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as it was written, of which equal ones are compiled once. The constructors do not compile.

    Attributes:
        kind: what it is written in.
        text: a JSON schema, a regular expression or Lark.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Self:
        """Raises ValueError if it is no JSON."""
        if not isinstance(schema, Mapping):
            raise ValueError(f"json_schema is {schema!r}; give a JSON object")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON: {error}") from error

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"{self.kind} is {self.text!r}; it must be a text")
        if len(self.text) > _MOST_CHARACTERS:
            raise ValueError(f"{self.kind} has {len(self.text)} characters; it must have at most {_MOST_CHARACTERS}")

    def for_llguidance(self) -> str:
        """As llguidance reads it. Raises ValueError where it sees that it cannot."""
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.text)
        return LLMatcher.grammar_from_json_schema(
            self.text, defaults={"whitespace_pattern": _WHITESPACE}, overrides={"lenient": False}
        )


class Grammar:
    """A compiled constraint on an answer. Immutable; many requests and choices may share it.

    `GrammarCompiler` makes it, for the vocabulary of one target.

    Attributes:
        vocab_size: ids of the target.
        stop_token_ids: tokens that end an answer, which a mask allows where the answer is complete.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids

    def start(self) -> GrammarState:
        """The state of an answer that has no token yet."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """How far the answer of one choice has come in its grammar.

    Attributes:
        matcher: with exactly the tokens that the answer has.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that the answer has got.

        Raises:
            GrammarError: the grammar does not allow them, or has come to a limit of time or memory.
        """
        # One by one: a list may not begin with a stop token where nothing else is possible.
        if not all(self.matcher.consume_token(token) for token in token_ids):
            raise GrammarError(f"grammar: {_brief(self.matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps what it compiled. Safe to use from any thread.

    Whoever writes a grammar may mean harm. Its text is limited; a process apart tries it first, so that a crash or an
    endless compilation costs nothing; steps and memory of what is compiled are limited as well; and what was refused is
    not tried again for a while.

    Args:
        tokenizer: a fast one with a byte-level or byte-fallback vocabulary.
        vocab_size: ids of the target; those that the tokenizer does not have are never allowed.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids)
        self._constrainable: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, GrammarSource], Grammar] = OrderedDict()
        self._refused: OrderedDict[tuple[str, GrammarSource], tuple[str, float]] = OrderedDict()

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.compile(GrammarSource.json_object())

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema accepts, with properties in its order and little whitespace.

        Raises:
            ValueError: the schema is not valid, says what cannot be enforced, accepts nothing, or is too large.
        """
        return self.compile(GrammarSource.json_schema(schema))

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole (syntax of Rust's ``regex``: no look-around).

        Raises:
            ValueError: it is not valid, matches nothing, or is too large.
        """
        return self.compile(GrammarSource("regex", pattern))

    def lark(self, text: str) -> Grammar:
        """Text of a context-free grammar in llguidance's variant of Lark's syntax.

        Raises:
            ValueError: it is not valid, matches nothing, or is too large.
        """
        return self.compile(GrammarSource("lark", text))

    def compile(self, source: GrammarSource, *, namespace: str = "") -> Grammar:
        """Compile a grammar, or find it if that was done already.

        Args:
            namespace: only what was compiled in this namespace is found.

        Raises:
            ValueError: it is not valid, says what cannot be enforced, accepts nothing, or takes too much; at once if it
                has been refused in the last minute.
        """
        if (known := self.known(source, namespace=namespace)) is not None:
            return known
        key = (namespace, source)
        try:
            grammar = self._compile(source)
        except ValueError as error:
            with self._lock:
                self._refused[key] = (str(error), time.monotonic())
                while len(self._refused) > _MOST_CACHED:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._compiled[key] = grammar
            while len(self._compiled) > _MOST_CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def known(self, source: GrammarSource, *, namespace: str = "") -> Grammar | None:
        """What `compile` finds without compiling, None if that needs to be done. ValueError: as `compile`."""
        key = (namespace, source)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            if key in self._refused:
                message, since = self._refused[key]
                if time.monotonic() < since + _REFUSED_SECONDS:
                    raise ValueError(message)
                del self._refused[key]
        return None

    def _compile(self, source: GrammarSource) -> Grammar:
        tokenizer, name = self._constrainable_tokenizer(), source.kind
        try:
            grammar = source.for_llguidance()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        failure = trial_failure(grammar)
        if failure is not None:
            raise ValueError(f"{name}: {failure}")
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        began = time.thread_time()
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()  # copies begin with what this has worked out
        seconds = time.thread_time() - began
        message = _brief(matcher.get_error())
        if message and not message.startswith("NoExtension"):  # so it says that nothing can come next
            raise ValueError(f"{name}: {message}")
        if message or not any(mask):
            raise ValueError(f"{name}: no text of this target's tokens satisfies it")
        if seconds > _MOST_SECONDS:
            raise ValueError(
                f"{name}: a mask takes {seconds:.1f} seconds, more than {_MOST_SECONDS:g}; make it simpler (long fixed "
                "texts and counted repetitions cost most)"
            )
        return Grammar(matcher, vocab_size=self._vocab_size, stop_token_ids=self._stop_token_ids)

    def _constrainable_tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it, made when it is first asked for (half a second)."""
        with self._lock:
            if self._constrainable is None:
                if not self._stop_token_ids:
                    raise ValueError("a grammar needs a target with a stop token: nothing else could end its answer")
                try:
                    self._constrainable = llguidance.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._stop_token_ids)
                    )
                except ValueError as error:
                    raise ValueError(f"this target's tokenizer cannot be held to a grammar: {error}") from error
            return self._constrainable


def _brief(message: str) -> str:
    """What went wrong, without the state of the parser behind it."""
    return message.split("\n<", maxsplit=1)[0].strip()

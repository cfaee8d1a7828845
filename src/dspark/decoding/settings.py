"""What a request asks of sampling, checked once where it is created."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_TEMPERATURE = 1e-5
"""Smallest positive temperature: below it division overflows and the answer is greedy anyway."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How a request turns logits into a distribution; ``transforms`` says in which order it is applied.

    Attributes:
        temperature: 0 is greedy (the largest logit after bias and penalties, ties to the lowest id); else >= 1e-5.
        top_k: keep the ``top_k`` largest logits and all that equal the last of them; None keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches ``top_p``; 1 keeps all.
        min_p: keep tokens at least ``min_p`` times as probable as the most probable one; 0 keeps all.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: in [-2, 2]; subtracted once from the logit of every token in the output.
        frequency_penalty: in [-2, 2]; subtracted once per occurrence in the output.
        logit_bias: target token id -> number added to its logit; ``-inf`` forbids the token.
        seed: None draws fresh randomness; an integer makes the output a function of prompt, settings and seed.

    Raises:
        ValueError: a field is out of its range; the message names the field and the range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a finite number")
        _require(
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            "temperature", self.temperature, f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )  # fmt: skip
        _require(
            self.top_k is None or (_is_integer(self.top_k) and self.top_k >= 1),
            "top_k", self.top_k, "an integer of at least 1, or None to keep all tokens",
        )  # fmt: skip
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 keeps all tokens")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]; 0 keeps all tokens")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "greater than 0; 1 is off")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]; 0 is off")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]; 0 is off")
        _require(
            self.seed is None or (_is_integer(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed", self.seed, "a signed 64-bit integer, or None for fresh randomness",
        )  # fmt: skip
        for token, bias in self.logit_bias.items():
            _require(_is_integer(token) and token >= 0, "logit_bias key", token, "a token id of at least 0")
            allowed = _is_number(bias) or bias == -math.inf
            _require(allowed, f"logit_bias[{token}]", bias, "a finite number, or -inf to forbid the token")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's mapping may change later

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax, so that no randomness is drawn."""
        return self.temperature == 0

    @property
    def is_temperature_alone(self) -> bool:
        """Whether the distribution is the softmax of logits over a positive temperature, and nothing else."""
        untouched = not self.logit_bias and not self.needs_history
        return untouched and self.temperature > 0 and self.top_k is None and self.top_p == 1 and self.min_p == 0

    @property
    def needs_history(self) -> bool:
        """Whether a penalty is on, so that the distribution depends on the tokens seen so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")

"""What decides the content of a data set, apart from the target and the prompt sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of a regeneration run. All of them change the rows: the manifest keeps them, resuming compares them.

    rows: rows planned; some of them are dropped, and recorded as such.
    seed: seed of the run; the randomness of a row is a function of (seed, row id) alone.
    temperatures: the temperature of a row's answers is drawn from these, uniformly.
    answer_top_p: nucleus of the answers (1 = off).
    max_answer_tokens: longest answer, in tokens.
    max_prompt_tokens: longest user turn that the target may write, in tokens; one that goes on longer is dropped.
    max_length: longest row in tokens, prompt included.
    user_temperature, user_top_p: how the target samples a user turn.
    steered_answer_fraction: share of self-prompted rows whose answer is given under the system prompt that steered
        the user turn; the others are answered under the template's default, as in use.
    near_duplicate_similarity: a self-written user turn whose word 5-grams have at least this Jaccard similarity
        with an earlier one is dropped.
    forbidden_ngram_words: a prompt that shares a run of this many words with a forbidden prompt is dropped.

    Raises ValueError that names the field.
    """

    rows: int
    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    answer_top_p: float = 1.0
    max_answer_tokens: int = 256
    max_prompt_tokens: int = 192
    max_length: int = 640
    user_temperature: float = 1.0
    user_top_p: float = 0.98
    steered_answer_fraction: float = 0.1
    near_duplicate_similarity: float = 0.7
    forbidden_ngram_words: int = 8

    def __post_init__(self) -> None:
        for name in ("rows", "max_answer_tokens", "max_prompt_tokens", "forbidden_ngram_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_length < 2:
            raise ValueError(
                f"max_length must be at least 2, a prompt token and an answer token, got {self.max_length}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not self.temperatures:
            raise ValueError("temperatures must name at least one temperature, for example (0.0, 1.0)")
        for temperature in (*self.temperatures, self.user_temperature):
            if not 0.0 <= temperature <= 10.0:
                raise ValueError(f"temperatures and user_temperature must lie in [0, 10], got {temperature}")
        for name in ("answer_top_p", "user_top_p", "near_duplicate_similarity"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if not 0.0 <= self.steered_answer_fraction <= 1.0:
            raise ValueError(f"steered_answer_fraction must lie in [0, 1], got {self.steered_answer_fraction}")

"""Random tiny models: a distribution for every prefix, made up on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dspark.decoding import SamplingSettings, TokenHistory, token_probs
from dspark.decoding.enumeration import Admission, DraftedRound, TokenModel, Tokens


def random_logits(seed: int, num_tokens: int, *, zeros: float = 0.0) -> Callable[[Tokens], Tensor]:
    """A table of float64 logits; each entry but one of a row is ``-inf`` with probability ``zeros``."""

    @functools.cache
    def logits(prefix: Tokens) -> Tensor:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        row = 1.5 * generator.standard_normal(num_tokens)
        is_zero = generator.random(num_tokens) < zeros
        is_zero[generator.integers(num_tokens)] = False
        row[is_zero] = -np.inf
        return torch.from_numpy(row)

    return logits


def random_table(seed: int, num_tokens: int, *, zeros: float = 0.0) -> TokenModel:
    """A table of distributions."""
    logits = random_logits(seed, num_tokens, zeros=zeros)
    return functools.cache(lambda prefix: logits(prefix).softmax(dim=-1))


def sampled_table(
    logits: Callable[[Tokens], Tensor],
    settings: SamplingSettings,
    prompt: Tokens,
    token_ids: Tokens | None = None,
) -> TokenModel:
    """The table that a request with ``settings`` samples from, penalties included."""
    columns = None if token_ids is None else torch.tensor(token_ids)

    @functools.cache
    def probs(prefix: Tokens) -> Tensor:
        history = TokenHistory(prompt)
        history.extend(prefix[len(prompt) :])
        return token_probs(logits(prefix), settings, history, columns)

    return probs


def argmax_table(table: TokenModel) -> TokenModel:
    """One-hot rows on each row's argmax."""
    return lambda prefix: torch.nn.functional.one_hot(table(prefix).argmax(), len(table(prefix))).double()


def confident_admission(seed: int, threshold: float) -> Admission:
    """Admit while the product of made-up confidences c_k(prefix, x_1..x_{k-1}) stays above ``threshold``."""

    def admits(prefix: Tokens, drafted: Tokens, past: tuple[DraftedRound, ...]) -> bool:
        survival = 1.0
        for k in range(len(drafted) + 1):
            generator = np.random.default_rng([seed, len(prefix), *prefix, 99, *drafted[:k]])
            survival *= generator.uniform(0.3, 1.0)
        return survival > threshold

    return admits


def delayed_admission(seed: int) -> Admission:
    """Admit up to a budget that everything drafted in earlier rounds decides, discarded tokens included."""

    def admits(prefix: Tokens, drafted: Tokens, past: tuple[DraftedRound, ...]) -> bool:
        key = [token for past_prefix, block in past for token in (len(past_prefix), *past_prefix, *block)]
        return len(drafted) < np.random.default_rng([seed, len(key), *key]).integers(0, 4)

    return admits

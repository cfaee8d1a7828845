"""How one request draws its tokens: its rule, its settings, what it has seen and its randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from dspark.decoding import SamplingSettings, TokenHistory, noise_bits
from dspark.drafters.protocol import Drafter

Rule = Literal["greedy", "coupled", "speculative"]
"""``greedy``: temperature 0, argmax after bias and penalties, drafts kept while equal. ``coupled``: the target's sample
at a position is a function of (prefix, seed), drafts share its noise and are kept while equal. ``speculative``: the p/q
rule with fresh randomness."""


def request_sampling(
    settings: SamplingSettings,
    prompt_ids: Sequence[int],
    drafter: Drafter | None,
    random: Callable[[], float] | None = None,
) -> RequestSampling:
    """How a request with these settings draws: greedy at temperature 0, coupled with a seed, p/q otherwise.

    Args:
        random: uniforms in [0, 1) for the p/q rule; fresh operating-system entropy by default.
    """
    columns_D = None if drafter is None else drafter.draft_token_ids_D
    return RequestSampling(settings, prompt_ids, columns_D, random or np.random.default_rng().random)


class RequestSampling:
    """The state of a request's sampling between rounds; `dspark.engine.batch_sampling` draws with it.

    Attributes:
        rule: decides which of its draft tokens are kept.
        settings: the request's.
        draft_settings: those to draft with.
        together: equal for requests that can be computed together: rule, and settings as far as they matter to it.
        draft_token_ids_D: target id of each draft column; None if these are all target ids.
        random: uniforms in [0, 1) for the p/q rule.
        noise: for the coupled rule.
        history: what penalties look at; only kept if there are any.
        next_position: where the next committed token will sit.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt_ids: Sequence[int],
        draft_token_ids_D: torch.Tensor | None,
        random: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.draft_settings = _draftable(settings, draft_token_ids_D)
        self.draft_token_ids_D = draft_token_ids_D
        self.random = random
        self.noise = SeedNoise(settings.seed or 0, draft_token_ids_D)
        self.next_position = len(prompt_ids)
        self.history = TokenHistory(prompt_ids if settings.needs_history else ())
        self.rule: Rule = "speculative"
        relevant = replace(settings, seed=None)
        if settings.is_greedy:
            self.rule = "greedy"
            relevant = replace(relevant, top_k=None, top_p=1.0, min_p=0.0)
        elif settings.seed is not None:
            self.rule = "coupled"
        self.together = (self.rule, relevant)

    @property
    def is_plain(self) -> bool:
        """Whether neither bias nor penalty changes the order of the logits."""
        return not self.settings.needs_history and not self.settings.logit_bias

    @property
    def draws_plainly(self) -> bool:
        """Whether its drafts are the most likely tokens, or drawn with fresh randomness by temperature alone."""
        if self.rule == "greedy":
            return self.is_plain
        return self.rule == "speculative" and self.draft_settings.is_temperature_alone

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take note of the tokens that are now part of the output."""
        self.next_position += len(token_ids)
        if self.settings.needs_history:
            self.history.extend(token_ids)
        self.noise.forget(self.next_position)


class SeedNoise:
    """`noise_bits` of a seed at the coming positions: read by drafting, by verifying, and again after a rejection."""

    def __init__(self, seed: int, draft_token_ids_D: torch.Tensor | None) -> None:
        self._seed = seed
        # On the CPU, as the noise is; looked up once, not for every token.
        self._draft_ids = None if draft_token_ids_D is None else draft_token_ids_D.cpu()
        self._draft_ids_end = 0 if self._draft_ids is None else int(self._draft_ids.max()) + 1
        self._bits: dict[int, torch.Tensor] = {}

    def of_draft(self, position: int, num_columns: int) -> torch.Tensor:
        """Noise ``[num_columns]`` of the draft columns at an absolute position (CPU)."""
        if self._draft_ids is None:
            return self.of_target(position, num_columns)
        return self.of_target(position, self._draft_ids_end)[self._draft_ids]

    def of_target(self, position: int, vocab_size: int) -> torch.Tensor:
        """Noise ``[vocab_size]`` of the first target ids at an absolute position (CPU)."""
        bits_V = self._bits.get(position)
        if bits_V is None or len(bits_V) < vocab_size:
            bits_V = self._bits[position] = noise_bits(self._seed, position, vocab_size)
        return bits_V[:vocab_size]

    def forget(self, position: int) -> None:
        """Drop what lies before ``position``."""
        for past in [known for known in self._bits if known < position]:
            del self._bits[past]


def _draftable(settings: SamplingSettings, columns_D: torch.Tensor | None) -> SamplingSettings:
    """The settings for drafting: without the bans where these leave a reduced draft vocabulary no token at all.

    A banned token is then drafted, and never accepted; the output is the target's either way.
    """
    if columns_D is None:
        return settings
    banned = {token for token, bias in settings.logit_bias.items() if bias == -math.inf}
    if not banned or not banned.issuperset(columns_D.tolist()):
        return settings
    allowed = {token: bias for token, bias in settings.logit_bias.items() if token not in banned}
    return replace(settings, logit_bias=allowed)

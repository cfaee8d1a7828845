"""How one request draws its tokens: greedy, coupled to its seed, or by the p/q rule. One class a rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from dspark.decoding import (
    Acceptance,
    SamplingSettings,
    TokenHistory,
    accept_coupled,
    accept_greedy,
    accept_speculative,
    coupled_sample_rows,
    gumbel_noise,
    sample_rows,
    token_probs,
    warp_logits,
)
from dspark.drafters.protocol import Drafter, greedy_sampler


class RequestSampling(Protocol):
    """Draws a request's draft tokens and decides which of them the target's logits confirm."""

    def draft(self, index: int, logits_1D: torch.Tensor, tokens_1k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw draft token ``index`` of the block (a :data:`~dspark.drafters.protocol.DraftSampler`)."""
        ...

    def verify(
        self, logits_RV: torch.Tensor, draft_tokens: list[int], draft_probs_LD: torch.Tensor | None
    ) -> Acceptance:
        """Accept draft tokens left to right against ``L + 1`` rows of target logits.

        Args:
            logits_RV: the target's logits after the anchor and after each draft token.
            draft_tokens: L target ids.
            draft_probs_LD: distributions that they were drawn from; None where L = 0.
        """
        ...

    def commit(self, token_ids: list[int]) -> None:
        """Take note of the tokens that are now part of the output."""
        ...


def request_sampling(
    settings: SamplingSettings,
    prompt_ids: list[int],
    drafter: Drafter | None,
    random: Callable[[], float] | None = None,
) -> RequestSampling:
    """The rule that ``settings`` calls for: greedy at temperature 0, coupled with a seed, p/q otherwise.

    Args:
        random: uniforms in [0, 1) for the p/q rule; fresh operating-system entropy by default.
    """
    columns_D = None if drafter is None else drafter.draft_token_ids_D
    state = _RequestState(settings, prompt_ids, columns_D)
    if settings.is_greedy:
        return GreedySampling(state)
    if settings.seed is not None:
        return CoupledSampling(state, settings.seed)
    return SpeculativeSampling(state, random or np.random.default_rng().random)


class _RequestState:
    """Settings, token history and position of a request; the same for every rule."""

    def __init__(self, settings: SamplingSettings, prompt_ids: list[int], columns_D: torch.Tensor | None) -> None:
        self.settings = settings
        self.columns_D = columns_D
        self.next_position = len(prompt_ids)
        self.draft_settings = _draftable(settings, columns_D)
        self._history = TokenHistory(prompt_ids) if settings.needs_history else None

    def target_histories(self, draft_tokens: list[int]) -> list[TokenHistory] | None:
        return None if self._history is None else self._history.after_each(draft_tokens)

    def draft_history(self, tokens_1k: torch.Tensor) -> TokenHistory | None:
        if self._history is None:
            return None
        history = self._history.fork()
        history.extend(tokens_1k[0].tolist())
        return history

    def commit(self, token_ids: list[int]) -> None:
        self.next_position += len(token_ids)
        if self._history is not None:
            self._history.extend(token_ids)


class GreedySampling:
    """Temperature 0: argmax after bias and penalties, drafts accepted while equal."""

    def __init__(self, state: _RequestState) -> None:
        self._state = state
        settings = state.settings
        self._is_plain = not settings.needs_history and not settings.logit_bias

    def draft(self, index: int, logits_1D: torch.Tensor, tokens_1k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_plain:
            history = self._state.draft_history(tokens_1k)
            logits_1D = warp_logits(logits_1D, self._state.draft_settings, history, self._state.columns_D)
        return greedy_sampler(index, logits_1D, tokens_1k)

    def verify(
        self, logits_RV: torch.Tensor, draft_tokens: list[int], draft_probs_LD: torch.Tensor | None
    ) -> Acceptance:
        if not self._is_plain:
            logits_RV = warp_logits(logits_RV, self._state.settings, self._state.target_histories(draft_tokens))
        return accept_greedy(draft_tokens, logits_RV.argmax(dim=-1))

    def commit(self, token_ids: list[int]) -> None:
        self._state.commit(token_ids)


class CoupledSampling:
    """Seeded coupling: the target's sample at a position is a function of (prefix, seed); drafts share its noise."""

    def __init__(self, state: _RequestState, seed: int) -> None:
        self._state = state
        self._seed = seed
        # Noise is made on the CPU, up to the highest id that can be drafted; looked up once, not for every token.
        self._draft_ids = None if state.columns_D is None else state.columns_D.cpu()
        self._draft_ids_end = None if self._draft_ids is None else int(self._draft_ids.max()) + 1
        # Noise of the coming positions: drafting and verifying read the same, and a rejected position comes again.
        self._noise: dict[int, torch.Tensor] = {}

    def draft(self, index: int, logits_1D: torch.Tensor, tokens_1k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        probs_1D = token_probs(logits_1D, state.draft_settings, state.draft_history(tokens_1k), state.columns_D)
        gumbel_V = self._gumbel(state.next_position + index, self._draft_ids_end or logits_1D.shape[-1])
        gumbel_D = gumbel_V[: logits_1D.shape[-1]] if self._draft_ids is None else gumbel_V[self._draft_ids]
        return coupled_sample_rows(probs_1D, gumbel_D[None]), probs_1D

    def verify(
        self, logits_RV: torch.Tensor, draft_tokens: list[int], draft_probs_LD: torch.Tensor | None
    ) -> Acceptance:
        state = self._state
        probs_RV = token_probs(logits_RV, state.settings, state.target_histories(draft_tokens))
        rows, vocab_size = logits_RV.shape
        noise = [self._gumbel(state.next_position + row, vocab_size)[:vocab_size] for row in range(rows)]
        return accept_coupled(draft_tokens, coupled_sample_rows(probs_RV, torch.stack(noise)))

    def commit(self, token_ids: list[int]) -> None:
        self._state.commit(token_ids)
        for position in [p for p in self._noise if p < self._state.next_position]:
            del self._noise[position]

    def _gumbel(self, position: int, size: int) -> torch.Tensor:
        noise_V = self._noise.get(position)
        if noise_V is None or len(noise_V) < size:
            noise_V = self._noise[position] = gumbel_noise(self._seed, position, size)
        return noise_V


class SpeculativeSampling:
    """The p/q rule with fresh randomness."""

    def __init__(self, state: _RequestState, random: Callable[[], float]) -> None:
        self._state = state
        self._random = random

    def draft(self, index: int, logits_1D: torch.Tensor, tokens_1k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        probs_1D = token_probs(logits_1D, state.draft_settings, state.draft_history(tokens_1k), state.columns_D)
        uniforms_1 = torch.tensor([self._random()], dtype=torch.float64)
        return sample_rows(probs_1D, uniforms_1), probs_1D

    def verify(
        self, logits_RV: torch.Tensor, draft_tokens: list[int], draft_probs_LD: torch.Tensor | None
    ) -> Acceptance:
        state = self._state
        target_probs_RV = token_probs(logits_RV, state.settings, state.target_histories(draft_tokens))
        if draft_probs_LD is None:
            draft_probs_LD = target_probs_RV.new_empty(0, 0)
        uniforms = [self._random() for _ in draft_tokens]
        return accept_speculative(
            draft_tokens, target_probs_RV, draft_probs_LD, uniforms, self._random(), state.columns_D
        )

    def commit(self, token_ids: list[int]) -> None:
        self._state.commit(token_ids)


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

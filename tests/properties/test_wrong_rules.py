"""The enumeration must be able to fail: known wrong rules deviate clearly, so a pass means something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark.decoding import Acceptance, accept_greedy, accept_speculative, sample_from
from dspark.decoding.enumeration import (
    DraftedRound,
    Drafting,
    Tokens,
    autoregressive_law,
    fixed_length,
    greedy_rule,
    largest_deviation,
    non_anticipating,
    output_law,
    speculative_rule,
)
from tests.properties.tables import argmax_table, random_table

CLEAR = 0.02
PROMPT: Tokens = (0,)


def accept_without_residual(
    draft_tokens: list[int],
    target_probs_RV: Tensor,
    draft_probs_LD: Tensor,
    accept_uniforms: list[float],
    final_uniform: float,
    draft_token_ids_D: Tensor | None,
) -> Acceptance:
    """Wrong: after a rejection the next token is drawn from p instead of the residual."""
    arguments = (draft_tokens, target_probs_RV, draft_probs_LD, accept_uniforms, final_uniform, draft_token_ids_D)
    right = accept_speculative(*arguments)
    return Acceptance(right.num_accepted, sample_from(target_probs_RV[right.num_accepted], final_uniform))


def accept_with_unnormalised_residual(
    draft_tokens: list[int],
    target_probs_RV: Tensor,
    draft_probs_LD: Tensor,
    accept_uniforms: list[float],
    final_uniform: float,
    draft_token_ids_D: Tensor | None,
) -> Acceptance:
    """Wrong: max(p - q, 0) is used as it is, so the uniform runs past its end and the last token gets the rest."""
    arguments = (draft_tokens, target_probs_RV, draft_probs_LD, accept_uniforms, final_uniform, draft_token_ids_D)
    right = accept_speculative(*arguments)
    if right.num_accepted == len(draft_tokens):
        return right
    residual_V = (target_probs_RV[right.num_accepted] - draft_probs_LD[right.num_accepted]).clamp(min=0)
    token = int(torch.searchsorted(residual_V.cumsum(dim=-1), final_uniform, right=True))
    return Acceptance(right.num_accepted, min(token, len(residual_V) - 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("accept", [accept_without_residual, accept_with_unnormalised_residual])
def test_a_wrong_residual_is_exposed(seed: int, accept) -> None:
    target = random_table(seed, 3)
    drafting = Drafting(probs=random_table(seed + 100, 3), num_tokens=1)
    wrong = output_law(target, drafting, fixed_length(1), speculative_rule(accept), PROMPT, 2)
    right = output_law(target, drafting, fixed_length(1), speculative_rule(), PROMPT, 2)
    own = autoregressive_law(target, PROMPT, 2)
    assert largest_deviation(wrong, own) > CLEAR
    assert largest_deviation(right, own) < 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_argmax_drafts_given_as_if_sampled_are_exposed(seed: int) -> None:
    target, drafter = random_table(seed, 3), random_table(seed + 100, 3)
    wrong = Drafting(probs=drafter, drawn_from=argmax_table(drafter), num_tokens=2)
    honest = Drafting(probs=argmax_table(drafter), num_tokens=2)
    own = autoregressive_law(target, PROMPT, 3)
    rule = speculative_rule()
    assert largest_deviation(output_law(target, wrong, fixed_length(2), rule, PROMPT, 3), own) > CLEAR
    assert largest_deviation(output_law(target, honest, fixed_length(2), rule, PROMPT, 3), own) < 1e-12


class AppendixA:
    """Two tokens, A = 0 and B = 1, in the manner of the paper's Appendix A: the confidence of x_2 depends on x_1.

    p(A) = 0.7, q(A) = 0.5. If x_1 is A the drafter is sure of x_2, if B it is not. A search over current confidences
    verifies x_1 only where the whole block looks good, that is only where x_1 is A. Then
    P(A) = q(A) min(1, p/q) + (1 - q(A)) p(A) = 0.5 + 0.5 * 0.7 = 0.85 instead of 0.7.
    """

    target = staticmethod(lambda prefix: torch.tensor([0.7, 0.3], dtype=torch.float64))
    drafting = Drafting(probs=lambda prefix: torch.tensor([0.5, 0.5], dtype=torch.float64), num_tokens=2)

    @staticmethod
    def retrospective(prefix: Tokens, block: Tokens, past: tuple[DraftedRound, ...]) -> int:
        return 2 if block[0] == 0 else 0

    @staticmethod
    def admits(prefix: Tokens, drafted: Tokens, past: tuple[DraftedRound, ...]) -> bool:
        return drafted in ((), (0,))


def probability_of_a(verify_length) -> float:
    law = output_law(AppendixA.target, AppendixA.drafting, verify_length, speculative_rule(), PROMPT, 1)
    return law[(0,)]


def test_retrospective_trimming_is_exposed() -> None:
    assert probability_of_a(AppendixA.retrospective) == pytest.approx(0.85, abs=1e-12)
    assert probability_of_a(non_anticipating(AppendixA.admits)) == pytest.approx(0.7, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_length_chosen_by_the_drawn_token_is_exposed(seed: int) -> None:
    target = random_table(seed, 3)
    drafting = Drafting(probs=random_table(seed + 100, 3), num_tokens=2)
    wrong = output_law(target, drafting, lambda prefix, block, past: block[0], speculative_rule(), PROMPT, 3)
    assert largest_deviation(wrong, autoregressive_law(target, PROMPT, 3)) > CLEAR


def test_greedy_is_lossless_even_under_a_retrospective_scheduler() -> None:
    target = argmax_table(random_table(3, 3))
    drafting = Drafting(probs=random_table(103, 3), num_tokens=2)
    law = output_law(target, drafting, lambda prefix, block, past: block[0], greedy_rule, PROMPT, 4)
    assert largest_deviation(law, autoregressive_law(target, PROMPT, 4)) < 1e-12


def test_accepting_by_argmax_at_temperature_one_is_exposed() -> None:
    """The greedy rule on a target that samples: always the argmax, never the distribution."""
    assert accept_greedy([1], [0, 1]) == Acceptance(0, 0)
    target = random_table(4, 3)
    drafting = Drafting(probs=random_table(104, 3), num_tokens=2)
    law = output_law(target, drafting, fixed_length(2), greedy_rule, PROMPT, 2)
    assert largest_deviation(law, autoregressive_law(target, PROMPT, 2)) > CLEAR

"""Under a grammar the p/q rule emits the masked target's distribution: exact enumeration, with the engine's masks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark.decoding.enumeration import (
    Drafting,
    Tokens,
    VerifiedBlock,
    autoregressive_law,
    block_law,
    coupled_rule,
    largest_deviation,
    speculative_rule,
)
from dspark.engine.choice import Choice
from dspark.engine.grammar_masks import GrammarMasks
from dspark.engine.request import Request
from tests.engine.toy_grammar import END, PATTERN, TOKENS, allowed, toy_compiler
from tests.properties.tables import random_logits, random_table

TOLERANCE = 1e-12
CLEAR = 0.02
HORIZON, BLOCK_SIZE = 3, 2
GRAMMAR = toy_compiler().regex(PATTERN)
RULES = {"speculative": speculative_rule(), "coupled": coupled_rule}
Rows = Callable[[Tokens, Tokens], Tensor]
"""(answer so far, verified draft) -> the target's logits [L + 1, V], masked."""


def unmasked(seed: int) -> Callable[[Tokens], Tensor]:
    """Logits of a target that never goes on behind the end, so that an answer has a law of whole length."""
    logits = random_logits(seed, len(TOKENS))
    ended_V = torch.full((len(TOKENS),), -torch.inf, dtype=torch.float64)
    ended_V[END] = 0.0
    return lambda answer: ended_V if END in answer else logits(answer)


def masked_target(seed: int) -> Callable[[Tokens], Tensor]:
    """The law that must come out, by an oracle of the language."""
    logits = unmasked(seed)

    def probs(answer: Tokens) -> Tensor:
        row_V = logits(answer).clone()
        if END not in answer:
            row_V[[token for token in range(len(TOKENS)) if token not in allowed(answer)]] = -torch.inf
        return row_V.softmax(-1)

    return probs


def is_in_language(answer: Tokens) -> bool:
    return all(token in allowed(answer[:place]) for place, token in enumerate(answer))


def engine_rows(seed: int, *, walks: bool = True) -> Rows:
    """Masked as the engine does it, another choice's rows before; a wrong one masks the first row only."""
    logits = unmasked(seed)
    masks = GrammarMasks(len(TOKENS))

    def choice(number: int, answer: Tokens) -> Choice:
        made = Choice(
            Request(prompt_ids=(0,), grammar=GRAMMAR),
            choice_id=number,
            index=0,
            max_tokens=9,
            drafter=None,
            tokenizer=None,
        )
        assert made.grammar is not None
        made.grammar.extend(answer)
        return made

    def rows(answer: Tokens, draft: Tokens) -> Tensor:
        rows_RV = torch.stack([logits(answer + draft[:k]) for k in range(len(draft) + 1)])
        if END in answer or not is_in_language(answer):
            return rows_RV  # the engine has ended it, or a wrong mask has let it out
        if not walks:
            first_1V, _ = masks.apply([choice(1, answer)], [()], rows_RV[:1].clone())
            return torch.cat([first_1V, rows_RV[1:]])
        beside_RV = torch.zeros(3, len(TOKENS), dtype=torch.float64)
        logits_RV = torch.cat([beside_RV, rows_RV])
        all_RV, empty = masks.apply([choice(1, (2,)), choice(2, answer)], [(3, 0), draft], logits_RV)
        assert empty == {}
        return all_RV[3:]

    return rows


def emitted_law(
    rows: Rows, drafting: Drafting, rule_name: str, verified: Callable[[Tokens, Tokens], Tokens]
) -> dict[Tokens, float]:
    """Law of the first tokens that rounds of draft, verify and commit emit."""

    @functools.cache
    def outcomes(answer: Tokens, draft: Tokens) -> list[tuple[Tokens, float]]:
        draft_rows = [drafting.probs(answer + draft[:k]) for k in range(len(draft))]
        block = VerifiedBlock(
            draft_tokens=draft,
            target_probs_RV=rows(answer, draft).softmax(-1),
            draft_probs_LD=torch.stack(draft_rows) if draft_rows else torch.empty(0, len(TOKENS), dtype=torch.float64),
            draft_token_ids_D=None,
        )
        return [
            ((*draft[: acceptance.num_accepted], acceptance.next_token), mass)
            for acceptance, mass in RULES[rule_name](block).items()
        ]

    @functools.cache
    def law(answer: Tokens) -> dict[Tokens, float]:
        if len(answer) >= HORIZON:
            return {answer[:HORIZON]: 1.0}
        total: defaultdict[Tokens, float] = defaultdict(float)
        for block, block_mass in block_law(drafting, answer).items():
            for tokens, mass in outcomes(answer, verified(answer, block)):
                for whole, rest in law(answer + tokens).items():
                    total[whole] += block_mass * mass * rest
        return total

    return law(())


def drafting(seed: int) -> Drafting:
    """Knows nothing of the grammar."""
    return Drafting(probs=random_table(seed + 100, len(TOKENS)), num_tokens=BLOCK_SIZE)


def whole(answer: Tokens, block: Tokens) -> Tokens:
    return block


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_emitted_is_the_masked_targets_law(rule_name: str, seed: int) -> None:
    law = emitted_law(engine_rows(seed), drafting(seed), rule_name, whole)
    own = autoregressive_law(masked_target(seed), (), HORIZON)
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    assert largest_deviation(law, own) < TOLERANCE
    assert len(own) > 10


def test_masking_the_first_row_only_is_exposed() -> None:
    law = emitted_law(engine_rows(1, walks=False), drafting(1), "speculative", whole)
    assert largest_deviation(law, autoregressive_law(masked_target(1), (), HORIZON)) > CLEAR


def test_cutting_a_draft_where_it_leaves_the_grammar_is_exposed() -> None:
    """Wrong for p/q: whether a token is verified then depends on the token, and its q is left out of the residual."""

    def fitting(answer: Tokens, block: Tokens) -> Tokens:
        if END in answer:
            return block
        kept = 0
        while kept < len(block) and block[kept] in allowed((*answer, *block[:kept])):
            kept += 1
        return block[:kept]

    law = emitted_law(engine_rows(1), drafting(1), "speculative", fitting)
    assert largest_deviation(law, autoregressive_law(masked_target(1), (), HORIZON)) > CLEAR

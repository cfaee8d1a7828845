"""Each acceptance rule emits the target's own distribution: exact enumeration in float64, to 1e-12."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dspark.decoding import (
    SamplingSettings,
    accept_coupled,
    coupled_sample,
    gumbel_noise,
)
from dspark.decoding.enumeration import (
    Drafting,
    Rule,
    Tokens,
    VerifyLength,
    autoregressive_law,
    coupled_rule,
    fixed_length,
    greedy_rule,
    largest_deviation,
    non_anticipating,
    output_law,
    speculative_rule,
)
from tests.properties.tables import (
    argmax_table,
    confident_admission,
    delayed_admission,
    random_logits,
    random_table,
    sampled_table,
)

TOLERANCE = 1e-12
RULES = {"speculative": speculative_rule(), "coupled": coupled_rule, "greedy": greedy_rule}
PROMPT: Tokens = (0,)


def deviation(
    target, drafting: Drafting, verify_length: VerifyLength, rule: Rule, horizon: int, num_rounds: int | None = None
) -> float:
    emitted = output_law(target, drafting, verify_length, rule, PROMPT, horizon, num_rounds)
    assert sum(emitted.values()) == pytest.approx(1, abs=TOLERANCE)
    return largest_deviation(emitted, autoregressive_law(target, PROMPT, horizon))


def target_table(rule_name: str, seed: int, num_tokens: int, zeros: float = 0.0):
    table = random_table(seed, num_tokens, zeros=zeros)
    return argmax_table(table) if rule_name == "greedy" else table


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize(
    ("num_tokens", "block_size", "length"),
    [(v, g, length) for v in (2, 3, 4) for g in (1, 2, 3) for length in range(g + 1) if v**g <= 27],
)
def test_one_round_of_every_length(rule_name: str, num_tokens: int, block_size: int, length: int) -> None:
    for seed, zeros in ((1, 0.0), (2, 0.4)):
        target = target_table(rule_name, seed, num_tokens, zeros)
        drafting = Drafting(probs=random_table(seed + 100, num_tokens, zeros=zeros), num_tokens=block_size)
        horizon = block_size + 1
        assert deviation(target, drafting, fixed_length(length), RULES[rule_name], horizon, 1) < TOLERANCE


@pytest.mark.parametrize("rule_name", RULES)
def test_one_round_of_the_largest_size(rule_name: str) -> None:
    target = target_table(rule_name, 5, 4)
    drafting = Drafting(probs=random_table(105, 4), num_tokens=3)
    assert deviation(target, drafting, fixed_length(3), RULES[rule_name], 4, 1) < TOLERANCE


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize(
    ("num_tokens", "block_size", "horizon"), [(2, 1, 5), (2, 2, 5), (2, 3, 4), (3, 1, 4), (3, 2, 3), (4, 1, 3)]
)
def test_several_rounds(rule_name: str, num_tokens: int, block_size: int, horizon: int) -> None:
    for seed in (11, 12):
        target = target_table(rule_name, seed, num_tokens, zeros=0.2)
        drafting = Drafting(probs=random_table(seed + 100, num_tokens, zeros=0.2), num_tokens=block_size)
        assert deviation(target, drafting, fixed_length(block_size), RULES[rule_name], horizon) < TOLERANCE


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_length_that_depends_on_the_drafted_prefix(rule_name: str, seed: int) -> None:
    num_tokens, block_size, horizon = ((2, 3, 4), (3, 2, 3))[seed % 2]
    target = target_table(rule_name, seed + 20, num_tokens)
    drafting = Drafting(probs=random_table(seed + 120, num_tokens), num_tokens=block_size)
    verify_length = non_anticipating(confident_admission(seed, threshold=0.45))
    blocks = list(itertools.product(range(num_tokens), repeat=block_size))
    assert (
        len({verify_length(PROMPT, block, ()) for block in blocks} | {verify_length((0, 1), b, ()) for b in blocks}) > 1
    )
    assert deviation(target, drafting, verify_length, RULES[rule_name], horizon) < TOLERANCE


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("seed", range(2))
def test_length_that_depends_on_earlier_rounds(rule_name: str, seed: int) -> None:
    """As a delayed scheduler does; drafts are fresh in every round, so even discarded tokens may be looked at."""
    target = target_table(rule_name, seed + 30, 2)
    drafting = Drafting(probs=random_table(seed + 130, 2), num_tokens=2)
    verify_length = non_anticipating(delayed_admission(seed))
    assert deviation(target, drafting, verify_length, RULES[rule_name], 4) < TOLERANCE


@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize(("num_tokens", "token_ids"), [(3, (1,)), (3, (2, 0)), (4, (0, 3)), (4, (3, 1, 2))])
def test_reduced_draft_vocabulary(rule_name: str, num_tokens: int, token_ids: Tokens) -> None:
    target = target_table(rule_name, 40, num_tokens)
    drafting = Drafting(probs=random_table(140, len(token_ids)), num_tokens=2, token_ids=token_ids)
    assert deviation(target, drafting, fixed_length(2), RULES[rule_name], 3) < TOLERANCE
    scheduled = non_anticipating(confident_admission(1, threshold=0.5))
    assert deviation(target, drafting, scheduled, RULES[rule_name], 3) < TOLERANCE


@pytest.mark.parametrize("rule_name", ["speculative", "coupled"])
def test_drafter_equal_to_the_target_accepts_everything(rule_name: str) -> None:
    target = random_table(50, 3)
    drafting = Drafting(probs=target, num_tokens=2)
    assert deviation(target, drafting, fixed_length(2), RULES[rule_name], 3) < TOLERANCE
    one_round = output_law(target, drafting, fixed_length(2), RULES[rule_name], PROMPT, 3, 1)
    assert largest_deviation(one_round, autoregressive_law(target, PROMPT, 3)) < TOLERANCE


SETTINGS = {
    "temperature": SamplingSettings(temperature=0.6),
    "top_k": SamplingSettings(temperature=1.0, top_k=2),
    "top_p": SamplingSettings(temperature=1.2, top_p=0.7),
    "min_p": SamplingSettings(temperature=1.0, min_p=0.3),
    "penalties": SamplingSettings(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=-0.5, logit_bias={1: 0.8}
    ),
    "everything": SamplingSettings(
        temperature=0.8, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.4,
        logit_bias={0: -float("inf"), 2: 0.5},
    ),
    "greedy with penalties": SamplingSettings(repetition_penalty=1.5, presence_penalty=1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("token_ids", [None, (3, 1)], ids=["full", "reduced"])
def test_sampling_settings(name: str, token_ids: Tokens | None) -> None:
    """The settings shape target and drafter alike; the output is the target's distribution with those settings."""
    settings = SETTINGS[name]
    target = sampled_table(random_logits(60, 4), settings, PROMPT)
    draft_logits = random_logits(160, 4 if token_ids is None else len(token_ids))
    drafting = Drafting(
        probs=sampled_table(draft_logits, settings, PROMPT, token_ids), num_tokens=2, token_ids=token_ids
    )
    rules = (greedy_rule, speculative_rule()) if settings.is_greedy else (speculative_rule(), coupled_rule)
    for rule in rules:
        assert deviation(target, drafting, fixed_length(2), rule, 3) < TOLERANCE


def test_a_drafter_may_ignore_the_settings() -> None:
    settings = SETTINGS["everything"]
    target = sampled_table(random_logits(61, 3), settings, PROMPT)
    drafting = Drafting(probs=random_table(161, 3), num_tokens=2)
    for rule in (speculative_rule(), coupled_rule):
        assert deviation(target, drafting, fixed_length(2), rule, 3) < TOLERANCE


def test_coupled_output_is_the_targets_own_sample_on_every_path() -> None:
    """Whatever is drafted, and under any scheduler, even one that looks at all of the block and the target's samples.

    For every map from prefix to the target's sample (this is what a seed fixes) and every drafted block and length.
    """
    num_tokens, block_size = 2, 2
    for choice in itertools.product(range(num_tokens), repeat=1 + 2 + 4):
        prefixes = [tokens for n in range(3) for tokens in itertools.product(range(num_tokens), repeat=n)]
        sample_after = dict(zip(prefixes, choice, strict=True))
        path: Tokens = ()
        for _ in range(block_size + 1):
            path = (*path, sample_after[path])
        for block in itertools.product(range(num_tokens), repeat=block_size):
            for length in range(block_size + 1):
                samples = [sample_after[block[:k]] for k in range(length + 1)]
                result = accept_coupled(block[:length], samples)
                emitted = (*block[: result.num_accepted], result.next_token)
                assert emitted == path[: len(emitted)]


@pytest.mark.parametrize("token_ids", [None, (4, 0, 2)])
def test_seeded_output_does_not_depend_on_speculation(token_ids: Tokens | None) -> None:
    """Real noise, many rounds, lengths chosen by a scheduler that looks at everything."""
    num_tokens, horizon = 5, 12
    target = random_table(70, num_tokens, zeros=0.2)
    drafter = random_table(170, num_tokens if token_ids is None else len(token_ids), zeros=0.2)
    columns = torch.arange(num_tokens) if token_ids is None else torch.tensor(token_ids)

    def own_sample(prefix: Tokens, seed: int) -> int:
        return coupled_sample(target(prefix), gumbel_noise(seed, len(prefix), num_tokens))

    for seed in range(30):
        alone = PROMPT
        for _ in range(horizon):
            alone = (*alone, own_sample(alone, seed))
        prefix, schedule, num_accepted = PROMPT, random.Random(seed), 0
        while len(prefix) < len(alone):
            block: Tokens = ()
            for _ in range(3):
                noise = gumbel_noise(seed, len(prefix + block), num_tokens)[columns]
                block = (*block, int(columns[coupled_sample(drafter(prefix + block), noise)]))
            samples = [own_sample(prefix + block[:k], seed) for k in range(4)]
            agreeing = [block[k] == samples[k] for k in range(3)]
            length = schedule.choice([0, 3, sum(agreeing), agreeing.index(True) if any(agreeing) else 1])
            result = accept_coupled(block[:length], samples[: length + 1])
            num_accepted += result.num_accepted
            prefix = (*prefix, *block[: result.num_accepted], result.next_token)
        assert prefix[: len(alone)] == alone

"""Every policy under every acceptance rule: the joint output law of a batch is the product of the targets' own.

Exact enumeration of everything that can happen (drafted tokens, confidences as functions of the allowed prefix, the
real policies with their history, acceptance), in float64, to 1e-12; and the retrospective rule of Appendix A, which
must fail. Seeded coupling is enumerated as if its noise were fresh in every step; that discarded drafts have seen noise
which later steps use again cannot matter, because what is emitted is the target's own sample on every path (last test).

What was accepted in earlier steps corrects confidences, here so strongly that single tokens change what is decided.
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import pytest
import torch

from dspark.decoding import accept_coupled, coupled_sample, gumbel_noise
from dspark.decoding.batch_enumeration import EnumeratedRequest, joint_autoregressive_law, joint_output_law
from dspark.decoding.enumeration import Drafting, Tokens, coupled_rule, greedy_rule, largest_deviation, speculative_rule
from dspark.scheduling import Delayed, Fixed, Immediate, MeasuredCurve, Off, StepCost, Threshold, correction
from tests.properties.scheduled import (
    Confidence,
    Retrospective,
    ScheduledBatch,
    cliff_cost,
    made_up_confidence,
    memory_of,
    past_of,
    staircase_cost,
)
from tests.properties.tables import argmax_table, random_table


@pytest.fixture(autouse=True)
def _believes_every_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_OWN_PRIOR", "_SHARED_PRIOR"):
        monkeypatch.setattr(correction, name, 1.0)


TOLERANCE = 1e-12
CLEAR = 0.01
POLICIES = {
    "off": Off(),
    "fixed": Fixed(length=2),
    "threshold": Threshold(confidence=0.6),
    "immediate": Immediate(probe_every_steps=3),
    "delayed": Delayed(probe_every_steps=3),
}
RULES = {
    "speculative": (speculative_rule(),),
    "coupled": (coupled_rule,),
    "greedy": (greedy_rule,),
    "mixed": (speculative_rule(), greedy_rule, coupled_rule),
}


def batch_of(rules: str, seed: int, block_sizes: list[int], horizons: list[int], num_tokens: int = 2, **more):
    """Requests with targets, drafters and prompts of their own."""
    requests = []
    for r, (block_size, horizon) in enumerate(zip(block_sizes, horizons, strict=True)):
        rule = RULES[rules][r % len(RULES[rules])]
        table = random_table(seed + 10 * r, num_tokens)
        requests.append(
            EnumeratedRequest(
                target=argmax_table(table) if rule is greedy_rule else table,
                drafting=Drafting(probs=random_table(seed + 10 * r + 500, num_tokens), num_tokens=block_size),
                rule=rule,
                prefix=(r % num_tokens,),
                horizon=horizon,
                **{name: values[r] if isinstance(values, list) else values for name, values in more.items()},
            )
        )
    return requests


def deviation(requests, scheduled: ScheduledBatch, **how) -> float:
    law = joint_output_law(requests, scheduled, learns=scheduled.learns, **how)
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    return largest_deviation(law, joint_autoregressive_law(requests))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("num_tokens", "block_sizes", "horizons"),
    [(2, [2, 2], [4, 4]), (2, [3, 2], [4, 3]), (3, [1, 2], [3, 3]), (2, [2, 1, 1], [3, 3, 3])],
    ids=["2x2", "3+2", "three tokens", "three requests"],
)
def test_whole_runs(policy: str, rules: str, num_tokens: int, block_sizes: list[int], horizons: list[int]) -> None:
    """From the first step, without history, until every request has ended; blocks shrink at the end."""
    for seed in (2, 4):
        requests = batch_of(rules, seed, block_sizes, horizons, num_tokens, shortens=True)
        scheduled = ScheduledBatch(POLICIES[policy], staircase_cost(seed), made_up_confidence(seed))
        assert deviation(requests, scheduled) < TOLERANCE


@pytest.mark.parametrize("policy", ["immediate", "delayed"])
@pytest.mark.parametrize("rules", ["speculative", "mixed"])
def test_requests_join_and_leave(policy: str, rules: str) -> None:
    for seed in (3, 4):
        requests = batch_of(rules, seed, [2, 1, 2], [2, 3, 3], joins=[0, 0, 1], shortens=True)
        scheduled = ScheduledBatch(POLICIES[policy], staircase_cost(seed + 5), made_up_confidence(seed))
        assert deviation(requests, scheduled) < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("num_tokens", "block_sizes"), [(2, [3, 3]), (3, [2, 2]), (2, [2, 2, 2]), (2, [3, 1, 2])], ids=str
)
def test_one_step_of_whole_blocks(policy: str, rules: str, num_tokens: int, block_sizes: list[int]) -> None:
    """A step from a history, after which the targets go on alone. With it, every run is lossless by induction."""
    histories = [
        past_of(5, [[0.9, 0.8, 0.7], [0.6, 0.5, 0.1], [0.4, 0.4, 0.4]]),
        past_of(5, [[1.0, 1.0, 0.3], [0.8, 0.0, 0.0]]),
        past_of(4, [[0.2, 0.1, 0.1]]),
    ]
    for seed, history in enumerate(histories):
        requests = batch_of(rules, 20 + seed, block_sizes, [max(block_sizes)] * len(block_sizes), num_tokens)
        how = {"num_steps": 1, "first_step": 7, "memory": memory_of(history)}
        for cost in (staircase_cost, cliff_cost):
            scheduled = ScheduledBatch(POLICIES[policy], cost(seed, len(requests)), made_up_confidence(seed))
            assert deviation(requests, scheduled, **how) < TOLERANCE


@pytest.mark.parametrize("policy", ["fixed", "threshold", "immediate", "delayed"])
def test_with_prompt_tokens_and_a_token_limit(policy: str) -> None:
    most = []
    for seed in range(4):
        requests = batch_of("mixed", 40 + seed, [2, 2, 2], [2, 2, 2])
        limited = ScheduledBatch(
            POLICIES[policy], staircase_cost(seed), made_up_confidence(seed), prefill_tokens=3, token_limit=3 + 3 + 2
        )
        memory = memory_of(past_of(5, [[0.9, 0.8], [0.9, 0.7], [0.9, 0.9]]))
        assert deviation(requests, limited, num_steps=1, first_step=7, memory=memory) < TOLERANCE
        most.append(max(sum(lengths) for _, _, lengths in limited.seen))
    assert max(most) == 2


def decisions(policy: str) -> set[tuple]:
    """(why, budget, lengths) of all decisions in runs like those above."""
    seen: set[tuple] = set()
    for seed in (2, 4):
        scheduled = ScheduledBatch(POLICIES[policy], staircase_cost(seed), made_up_confidence(seed))
        requests = batch_of("speculative", seed, [2, 2], [4, 4], shortens=True)
        joint_output_law(requests, scheduled, learns=scheduled.learns)
        seen |= scheduled.seen.keys()
    return seen


def test_the_enumerated_runs_decide_differently() -> None:
    """Otherwise they would prove nothing: budgets, lengths and the choice to draft vary with what was drafted."""
    immediate, delayed = decisions("immediate"), decisions("delayed")
    assert len({lengths for _, _, lengths in immediate}) > 5
    assert len({(budget, lengths) for why, budget, lengths in delayed if why == "pays"}) > 3
    assert len({budget for why, budget, _ in delayed if why == "pays"}) > 1
    for seen in (immediate, delayed):
        assert {"no history", "pays", "parked"} <= {why for why, _, _ in seen}


def test_a_delayed_budget_crosses_what_algorithm_1_does_not() -> None:
    memory = memory_of(past_of(5, [[0.9, 0.8], [0.9, 0.8]]))
    verified = {}
    for policy in ("immediate", "delayed"):
        requests = batch_of("speculative", 2, [2, 2], [3, 3])
        scheduled = ScheduledBatch(POLICIES[policy], cliff_cost(2, 2), made_up_confidence(2))
        assert deviation(requests, scheduled, num_steps=1, first_step=7, memory=memory) < TOLERANCE
        verified[policy] = {sum(lengths) for _, _, lengths in scheduled.seen}
    assert verified == {"immediate": {0}, "delayed": {4}}


@pytest.mark.parametrize("rules", ["speculative", "mixed"])
@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_the_retrospective_rule_fails(rules: str, num_requests: int) -> None:
    worst = 0.0
    for seed in range(8):
        requests = batch_of(rules, seed, [2] * num_requests, [2] * num_requests)
        scheduled = ScheduledBatch(Retrospective(), cliff_cost(seed, num_requests), made_up_confidence(seed))
        worst = max(worst, deviation(requests, scheduled, num_steps=1))
    assert worst > CLEAR


@pytest.mark.parametrize("policy", ["threshold", "immediate", "delayed"])
def test_confidences_that_see_their_own_token_fail(policy: str) -> None:
    """The premise of all proofs: c_k depends on tokens before x_k alone (SPEC eq. 7)."""
    memory = memory_of(past_of(5, [[0.9, 0.0], [0.0, 0.0]]))
    worst = 0.0
    for seed in range(8):
        requests = batch_of("speculative", seed, [2, 2], [2, 2])
        scheduled = ScheduledBatch(
            POLICIES[policy], staircase_cost(seed), made_up_confidence(seed), sees_own_token=True
        )
        worst = max(worst, deviation(requests, scheduled, num_steps=1, first_step=7, memory=memory))
    assert worst > CLEAR


def test_what_was_accepted_decides() -> None:
    """With all else the same, confidences included: so the runs above cover it."""
    lengths_of: defaultdict[tuple, set[tuple[int, ...]]] = defaultdict(set)
    for seed in (2, 4):
        scheduled = ScheduledBatch(POLICIES["delayed"], staircase_cost(seed), lambda request, prefix, drafted: 0.6)
        assert deviation(batch_of("speculative", seed, [2], [6], shortens=True), scheduled) < TOLERANCE
        for known_but_acceptances, lengths in scheduled.decisions():
            lengths_of[seed, known_but_acceptances].add(lengths)
    assert max(map(len, lengths_of.values())) > 1


@pytest.mark.parametrize("policy", ["immediate", "delayed"])
def test_a_correction_by_the_steps_own_outcome_fails(policy: str) -> None:
    """Where the draft token is at most as likely as with the target, it will be accepted: that must not be used."""
    memory = memory_of(past_of(5, [[0.6, 0.3], [0.6, 0.3]]))
    worst = 0.0
    for seed in range(8):
        requests = batch_of("speculative", seed, [2, 2], [2, 2])

        def will_be_accepted(request: int, prefix: Tokens, block: Tokens, requests=requests) -> int:
            target, drafter = requests[request].target, requests[request].drafting.probs
            for k, token in enumerate(block):
                if target(prefix + block[:k])[token] < drafter(prefix + block[:k])[token]:
                    return k
            return len(block)

        scheduled = ScheduledBatch(
            POLICIES[policy], staircase_cost(seed), made_up_confidence(seed), judges=will_be_accepted
        )
        worst = max(worst, deviation(requests, scheduled, num_steps=1, first_step=7, memory=memory))
    assert worst > CLEAR


class AppendixA:
    """Two tokens, A = 0 and B = 1; p(A) = 0.7, q(A) = 0.5 at the first position, so c_1 = 1 - TV = 0.8.

    After A target and drafter agree (c_2 = 1), after B they are disjoint (c_2 = 0): the confidences are exact. The cost
    is such that one draft token never pays (Theta 1.8 / 2 = 0.9 against 1), two pay after A (2.6 / 2.2) and not after B
    (1.8 / 2.2). A search over current confidences therefore verifies x_1 only where x_1 is A, and
    P(A) = q(A) min(1, p/q) + q(B) p(A) = 0.5 + 0.5 * 0.7 = 0.85 instead of 0.7.
    """

    TARGET: ClassVar = {1: [0.7, 0.3], 2: [[0.6, 0.4], [0.0, 1.0]]}
    DRAFT: ClassVar = {1: [0.5, 0.5], 2: [[0.6, 0.4], [1.0, 0.0]]}
    COST = StepCost(
        verify=MeasuredCurve(sizes=(1, 2, 3), seconds=(1.0, 2.0, 2.2)),
        draft={2: MeasuredCurve(sizes=(1,), seconds=(1e-9,))},
        prefill=MeasuredCurve(sizes=(1,), seconds=(1.0,)),
    )

    @classmethod
    def row(cls, table, prefix: Tokens) -> torch.Tensor:
        generated = prefix[1:]
        if len(generated) == 0:
            return torch.tensor(table[1], dtype=torch.float64)
        return torch.tensor(table[2][generated[0]] if len(generated) == 1 else [0.5, 0.5], dtype=torch.float64)

    @classmethod
    def confidence(cls, request: int, prefix: Tokens, drafted: Tokens) -> float:
        """Eq. 8, exactly: 1 - TV."""
        rows = (cls.row(cls.TARGET, prefix + drafted), cls.row(cls.DRAFT, prefix + drafted))
        return float(1 - 0.5 * (rows[0] - rows[1]).abs().sum())

    @classmethod
    def probability_of_a(cls, policy, memory=None) -> float:
        request = EnumeratedRequest(
            target=lambda prefix: cls.row(cls.TARGET, prefix),
            drafting=Drafting(probs=lambda prefix: cls.row(cls.DRAFT, prefix), num_tokens=2),
            rule=speculative_rule(),
            prefix=(0,),
            horizon=1,
        )
        scheduled = ScheduledBatch(policy, cls.COST, cls.confidence)
        law = joint_output_law([request], scheduled, learns=scheduled.learns, first_step=7, memory=memory)
        return law[((0,),)]


def test_appendix_a() -> None:
    """0.85 by the retrospective rule; 0.7 by ours, whatever was seen two steps ago."""
    assert AppendixA.probability_of_a(Retrospective()) == pytest.approx(0.85, abs=TOLERANCE)
    after_a, after_b = (memory_of(past_of(5, [survivals])) for survivals in ([0.8, 0.8], [0.8, 0.0]))
    for memory in (None, after_a, after_b):
        for policy in (Immediate(), Delayed(), Threshold(confidence=0.5), Fixed(length=2), Off()):
            assert AppendixA.probability_of_a(policy, memory) == pytest.approx(0.7, abs=TOLERANCE)


@pytest.mark.parametrize("policy", [*POLICIES.values(), Retrospective()], ids=lambda policy: policy.name)
def test_seeded_output_is_the_same_under_any_policy(policy) -> None:
    """Real noise, three requests, many steps; even the retrospective rule cannot change a seeded output."""
    num_tokens, block_size, horizon = 4, 3, 9
    targets = [random_table(70 + r, num_tokens) for r in range(3)]
    drafters = [random_table(70 + r if r else 90, num_tokens) for r in range(3)]
    confidence: Confidence = made_up_confidence(9)

    def sample(table, prefix: Tokens, seed: int) -> int:
        return coupled_sample(table(prefix), gumbel_noise(seed, len(prefix), num_tokens))

    verified = 0
    for seed in range(5):
        alone, prefixes = [(0,)] * 3, [(0,)] * 3
        for _ in range(horizon):
            alone = [(*tokens, sample(targets[r], tokens, seed + r)) for r, tokens in enumerate(alone)]
        scheduled, memory, step = ScheduledBatch(policy, staircase_cost(seed), confidence), None, 0
        while any(len(prefix) <= horizon for prefix in prefixes):
            rounds = []
            for r, prefix in enumerate(prefixes):
                block: Tokens = ()
                while len(block) < min(block_size, horizon - len(prefix)):
                    block = (*block, sample(drafters[r], prefix + block, seed + r))
                rounds.append((prefix, block) if len(prefix) <= horizon else None)
            lengths, memory = scheduled(memory, step, tuple(rounds))
            accepted: list[int | None] = [None] * len(rounds)
            for r, (drafted, length) in enumerate(zip(rounds, lengths, strict=True)):
                if drafted is None:
                    continue
                prefix, block = drafted[0], drafted[1][:length]
                samples = [sample(targets[r], prefix + block[:k], seed + r) for k in range(length + 1)]
                result = accept_coupled(block, samples)
                prefixes[r] = (*prefix, *block[: result.num_accepted], result.next_token)
                verified += length
                accepted[r] = result.num_accepted
            memory = scheduled.learns(memory, tuple(accepted))
            step += 1
        assert prefixes == alone
    assert (verified > 0) is (policy.name != "off")

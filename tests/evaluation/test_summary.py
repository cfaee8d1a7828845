from __future__ import annotations

import random

import pytest

from dspark.evaluation.answers import Record
from dspark.evaluation.plan import TARGET_ALONE, Arm
from dspark.evaluation.summary import completed_prompts, summarise
from tests.evaluation.made import answer, prompt, record, round_of

ARM = Arm(label="d", drafter="d")
ALONE = Arm(label=TARGET_ALONE)


def summary(prompts, arms, records, *, repeatable=True):
    return summarise(prompts, arms, records, repeatable=repeatable, seed=0)


def test_accepted_length_is_pooled_over_rounds_and_not_averaged_over_prompts():
    # One round of 4 tokens, and nine rounds of 1: 13 tokens in 10 rounds. The mean of the prompts would be 2.5.
    prompts = [prompt("a/0"), prompt("a/1")]
    records = [
        record("d", "a/0", answer([round_of(3)])),
        record("d", "a/1", answer([round_of(0)] * 9)),
    ]
    numbers = summary(prompts, [ARM], records)["arms"][0]["overall"]
    assert numbers["accepted_length"]["value"] == pytest.approx(1.3)
    assert numbers["committed"] == 13
    assert numbers["verified_token_acceptance"]["value"] == pytest.approx(3 / 30)


def test_positions_equal_a_count_by_hand():
    chance = random.Random(4)
    prompts = [prompt(f"a/{n}") for n in range(6)]
    rounds, records = [], []
    for p in prompts:
        made = []
        for _ in range(30):
            drafted = chance.randint(0, 4)
            verified = chance.randint(0, drafted)
            accepted = chance.randint(0, verified)
            # An answer may end inside the accepted run: then nothing is known behind it.
            cut = accepted == verified - 1 and accepted > 0 and chance.random() < 0.5
            made.append(
                round_of(
                    accepted,
                    drafted=drafted,
                    verified=verified,
                    judged=accepted if cut else verified,
                    committed=accepted if cut else accepted + 1,
                )
            )
        rounds += made
        records.append(record("d", p.id, answer(made)))
    numbers = summary(prompts, [ARM], records)["arms"][0]["overall"]
    assert [row["position"] for row in numbers["positions"]] == [1, 2, 3, 4]
    for row in numbers["positions"]:
        k = row["position"]
        judged = [r for r in rounds if r.judged >= k]
        reached = [r for r in judged if r.accepted >= k - 1]
        accepted = [r for r in reached if r.accepted >= k]
        assert (row["verified"], row["reached"], row["accepted"]) == (len(judged), len(reached), len(accepted))
        assert row["conditional_acceptance"]["value"] == pytest.approx(len(accepted) / len(reached))
        assert row["prefix_survival"]["value"] == pytest.approx(len(accepted) / len(judged))
    for key in ("drafted", "verified", "accepted", "committed"):
        assert numbers[key] == sum(getattr(r, key) for r in rounds)
    assert numbers["rounds"] == len(rounds)


def test_groups_speed_and_identity():
    prompts = [prompt("gsm8k/0"), prompt("gsm8k/1"), prompt("mbpp/0", domain="code")]
    records = []
    for p in prompts:
        records.append(record("d", p.id, answer([round_of(1)] * 4, seconds=3.0)))
        ids = range(9) if p.domain == "math" else range(1, 10)
        alone = answer([round_of(0, drafted=0)] * 8, seconds=5.0, token_ids=ids)
        records.append(record(TARGET_ALONE, p.id, alone))
    found = summary(prompts, [ALONE, ARM], records)
    (arm,) = found["arms"]
    assert set(arm["domains"]) == {"math", "code"}
    assert set(arm["benchmarks"]) == {"gsm8k", "mbpp"}
    assert [arm["domains"][name]["identical"] for name in ("math", "code")] == [2, 0]
    assert arm["overall"]["identical"] == 2
    # Eight tokens of rounds in 2 s of rounds, against 4 s; with the prompt's pass 9 tokens in 3 s against 5 s.
    assert arm["overall"]["decode_tokens_per_second"]["value"] == pytest.approx(4.0)
    assert found["target_alone"]["overall"]["decode_tokens_per_second"]["value"] == pytest.approx(2.0)
    assert arm["overall"]["speed_up"]["value"] == pytest.approx(2.0)
    assert arm["overall"]["end_to_end_speed_up"]["value"] == pytest.approx(5 / 3)
    assert arm["mean_of_domains"]["speed_up"] == pytest.approx(2.0)
    seconds = arm["overall"]["seconds"]
    assert seconds == {
        "total": 9.0, "prefill": 3.0, "draft": 0.75, "schedule": 0.0, "verify": 1.5, "commit": 0.375, "other": 3.375,
    }  # fmt: skip
    assert arm["overall"]["milliseconds_per_round"]["verify"] == pytest.approx(125.0)


def test_identity_is_not_counted_where_outputs_are_samples():
    prompts = [prompt("a/0")]
    records = [record(label, "a/0", answer([round_of(0)])) for label in ("d", TARGET_ALONE)]
    assert summary(prompts, [ALONE, ARM], records, repeatable=False)["arms"][0]["overall"]["identical"] is None
    assert summary(prompts, [ARM], records[:1])["arms"][0]["overall"]["speed_up"] is None


def test_two_drafters_are_compared_on_the_same_prompts():
    other = Arm(label="e", drafter="e")
    prompts = [prompt(f"a/{n}") for n in range(12)]
    records = []
    for n, p in enumerate(prompts):
        records.append(record("d", p.id, answer([round_of(n % 3)] * 8, seconds=3.0)))
        # One more token accepted in every second round: half a token a round, whatever the prompt.
        rounds = [round_of(n % 3), round_of(n % 3 + 1)] * 4
        records.append(record("e", p.id, answer(rounds, seconds=2.0)))
    (pair,) = summary(prompts, [ARM, other], records)["comparisons"]
    assert (pair["reference"], pair["other"]) == ("d", "e")
    difference = pair["overall"]["accepted_length_difference"]
    assert difference["value"] == pytest.approx(0.5)
    assert difference["interval"] == pytest.approx([0.5, 0.5])
    assert pair["overall"]["speed_ratio"]["value"] == pytest.approx(2.0 * 2.5 / 2.0)
    assert set(pair["domains"]) == {"math"}


def test_sweep_points_are_not_compared_but_reported():
    point = Arm(label="d, threshold 0.5", drafter="d", threshold=0.5)
    records = [
        record("d", "a/0", answer([round_of(1)])),
        record(point.label, "a/0", answer([round_of(1, verified=1)])),
    ]
    found = summary([prompt("a/0")], [ARM, point], records)
    assert found["comparisons"] == []
    assert [arm["threshold"] for arm in found["arms"]] == [None, 0.5]
    assert found["arms"][1]["overall"]["verified_token_acceptance"]["value"] == 1.0


def test_only_prompts_that_every_arm_has_answered_to_the_end_count():
    prompts = [prompt("a/0", turns=2), prompt("a/1", turns=2), prompt("a/2"), prompt("a/3")]
    given = answer([round_of(1)])
    records = [
        *(record(label, "a/0", given, turn=turn) for label in ("d", TARGET_ALONE) for turn in (0, 1)),
        record("d", "a/1", given, turn=0),
        record("d", "a/1", given, turn=1),
        record(TARGET_ALONE, "a/1", given, turn=0),
        Record(arm="d", prompt_id="a/2", turn=0, skipped="too long"),
    ]
    complete, answers, skipped = completed_prompts(prompts, [ALONE, ARM], records)
    assert [p.id for p in complete] == ["a/0"]
    assert len(answers["d", "a/0"]) == 2
    assert skipped == {"a/2": "too long"}
    found = summary(prompts, [ALONE, ARM], records)
    assert (found["prompts"], found["completed"]) == (4, 1)
    assert found["arms"][0]["overall"]["answers"] == 2


def test_nothing_answered_gives_no_numbers():
    found = summary([prompt("a/0")], [ALONE, ARM], [])
    overall = found["arms"][0]["overall"]
    assert found["completed"] == 0
    assert overall["accepted_length"] is None
    assert overall["rounds"] == 0


@pytest.mark.parametrize("tokens", [1])
def test_an_answer_of_one_token_has_no_round(tokens):
    found = summary([prompt("a/0")], [ARM], [record("d", "a/0", answer([], prefill=2.0))])
    overall = found["arms"][0]["overall"]
    assert overall["tokens"] == tokens
    assert overall["accepted_length"] is None
    assert overall["milliseconds_per_round"]["draft"] is None

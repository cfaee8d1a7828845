"""One request, with and without speculation, on tables whose output distribution is known."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dspark.decoding import SamplingSettings, TokenHistory, token_probs
from dspark.engine.generation import generate
from dspark.engine.result import GenerationResult, RoundEvent
from tests.cli.tokenizer import character_tokenizer
from tests.engine.table_models import STATES, TableDrafter, TableTarget, random_table

VOCABULARY = 5
PROMPT = (3, 1, 4)


def make_drafter(kind: str, block_size: int = 3) -> TableDrafter | None:
    """``near`` often agrees with the target of seed 0, ``far`` seldom, ``reduced`` knows three of its tokens."""
    near = (random_table(VOCABULARY, 0) + 0.3 * random_table(VOCABULARY, 1)) / 1.3
    if kind == "none":
        return None
    if kind == "reduced":
        ids = torch.tensor([0, 2, 3])
        return TableDrafter(near[:, ids] / near[:, ids].sum(-1, keepdim=True), block_size, ids)
    return TableDrafter(near if kind == "near" else random_table(VOCABULARY, 9), block_size)


def run(
    kind: str,
    settings: SamplingSettings,
    *,
    target: TableTarget | None = None,
    prompt: Sequence[int] = PROMPT,
    block_size: int = 3,
    **arguments: object,
) -> tuple[list[RoundEvent], GenerationResult]:
    target = target or TableTarget(random_table(VOCABULARY, 0))
    events = list(generate(target, make_drafter(kind, block_size), prompt, settings, **arguments))  # type: ignore[arg-type]
    result = events[-1].result
    assert result is not None
    assert all(event.result is None for event in events[:-1])
    return events, result


SETTINGS = {
    "plain": SamplingSettings(temperature=1.0),
    "cool-top-k": SamplingSettings(temperature=0.6, top_k=3),
    "top-p": SamplingSettings(temperature=1.3, top_p=0.8),
    "penalised": SamplingSettings(temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={1: 0.7}),
}


def exact_law(table_SV: torch.Tensor, settings: SamplingSettings, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``length`` tokens under the target alone."""
    law = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        history, total, probability = TokenHistory(PROMPT), sum(PROMPT), 1.0
        for token in tokens:
            probs = token_probs(table_SV.double().log()[total % STATES], settings, history)
            probability *= float(probs[token])
            history.append(token)
            total += token
        law[tokens] = probability
    return law


@pytest.mark.parametrize("kind", ["near", "far", "reduced"])
@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_outputs_follow_the_target(name: str, kind: str) -> None:
    target = TableTarget(random_table(VOCABULARY, 0))
    law = exact_law(target.table_SV, SETTINGS[name], 4)
    random = np.random.default_rng(len(name) * 10 + len(kind)).random
    count = 800
    seen = Counter(
        run(kind, SETTINGS[name], target=target, max_tokens=4, random=random)[1].token_ids for _ in range(count)
    )
    assert all(law[tokens] > 0 for tokens in seen)
    # Outcomes too rare to test alone are tested together.
    common = [tokens for tokens, probability in law.items() if probability * count >= 5]
    observed = [seen[tokens] for tokens in common]
    expected = [law[tokens] * count for tokens in common]
    observed.append(count - sum(observed))
    expected.append(count - sum(expected))
    assert chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["near", "far", "reduced"])
@pytest.mark.parametrize("seed", [None, 11, 12, 13])
@pytest.mark.parametrize(
    "settings",
    [{}, {"top_p": 0.9, "min_p": 0.02}, {"presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {2: -1.0}}],
)
def test_greedy_and_seeded_outputs_do_not_depend_on_speculation(
    settings: dict[str, object], seed: int | None, kind: str
) -> None:
    chosen = SamplingSettings(temperature=0.0 if seed is None else 1.0, seed=seed, **settings)  # type: ignore[arg-type]
    plain = run("none", chosen, max_tokens=40)[1]
    speculative = run(kind, chosen, max_tokens=40)[1]
    assert speculative.token_ids == plain.token_ids
    assert plain.drafted == plain.verified == plain.accepted == 0
    assert plain.accepted_length == 1.0
    assert speculative.rounds <= plain.rounds


def test_counts_add_up() -> None:
    for seed in range(8):
        events, result = run("near", SamplingSettings(temperature=1.0, seed=seed), max_tokens=30)
        rounds = events[1:]
        assert result.rounds == len(rounds)
        assert tuple(itertools.chain(*(event.token_ids for event in events))) == result.token_ids
        assert result.accepted == sum(event.accepted for event in rounds)
        assert result.verified == sum(event.verified for event in rounds) == sum(result.verified_per_position)
        assert result.accepted == sum(result.accepted_per_position)
        assert result.accepted_length == pytest.approx(29 / result.rounds)
        for position in range(3):
            verifying = [event for event in rounds if event.verified > position]
            assert result.verified_per_position[position] == len(verifying)
            assert result.reached_per_position[position] == sum(event.accepted >= position for event in verifying)
            assert result.accepted_per_position[position] == sum(event.accepted > position for event in verifying)
        # The last token is the target's own: no round drafts more than can still be used.
        assert all(
            event.verified <= 30 - before - 1
            for event, before in zip(rounds, itertools.accumulate(len(e.token_ids) for e in events), strict=False)
        )


@pytest.mark.parametrize("kind", ["none", "near"])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_is_met_exactly(kind: str, max_tokens: int) -> None:
    _, result = run(kind, SamplingSettings(seed=5, temperature=1.0), max_tokens=max_tokens)
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason == "length"


@pytest.mark.parametrize("kind", ["none", "near"])
def test_the_context_can_be_filled_to_its_last_position(kind: str) -> None:
    target = TableTarget(random_table(VOCABULARY, 0), context=12)
    _, result = run(kind, SamplingSettings(seed=1, temperature=1.0), target=target, max_tokens=100)
    assert len(PROMPT) + len(result.token_ids) == 12
    assert result.finish_reason == "length"
    _, result = run(kind, SamplingSettings(), target=target, prompt=[1] * 11, max_tokens=100)
    assert len(result.token_ids) == 1
    assert result.rounds == 0
    assert result.accepted_length == 0.0


@pytest.mark.parametrize("kind", ["none", "near"])
def test_a_stop_token_ends_the_answer_wherever_it_falls(kind: str) -> None:
    settings = SamplingSettings(seed=2, temperature=1.0)
    full = run(kind, settings, max_tokens=40)[1].token_ids
    for stop in range(VOCABULARY):
        if stop not in full:
            continue
        events, result = run(kind, settings, max_tokens=40, stop_token_ids=frozenset({stop}))
        cut = full.index(stop) + 1
        assert result.token_ids == full[:cut]
        assert result.finish_reason == "stop"
        assert sum(len(event.token_ids) for event in events) == cut
        assert result.accepted == sum(result.accepted_per_position) == sum(event.accepted for event in events)
        assert all(event.accepted <= len(event.token_ids) for event in events)


def test_positions_after_a_stop_inside_the_block_are_not_judged() -> None:
    # One token is certain, so every draft is accepted; the stop token is the second draft of the first round.
    table = torch.full((STATES, VOCABULARY), 1e-9)
    for state in range(STATES):
        table[state, 1 if state != 5 else 4] = 1.0
    target = TableTarget(table / table.sum(-1, keepdim=True))
    drafter = TableDrafter(target.table_SV, 3)
    events = list(generate(target, drafter, [2], SamplingSettings(), max_tokens=20, stop_token_ids=frozenset({4})))
    result = events[-1].result
    assert result is not None
    # 2 | 1 (prefill), then draft 1 1 4: state 2, 3, 4, 5.
    assert result.token_ids == (1, 1, 1, 4)
    assert (result.rounds, result.verified, result.accepted) == (1, 3, 3)
    assert result.accepted_length == 3.0
    longer = list(generate(target, TableDrafter(target.table_SV, 6), [2], SamplingSettings(), max_tokens=20,
                           stop_token_ids=frozenset({4})))[-1].result  # fmt: skip
    assert longer is not None
    assert longer.token_ids == result.token_ids
    assert (longer.drafted, longer.verified, longer.accepted) == (6, 6, 3)
    assert longer.verified_per_position == (1, 1, 1, 0, 0, 0)


@pytest.mark.parametrize("kind", ["none", "near"])
def test_stop_strings_are_cut_out_and_never_shown(kind: str) -> None:
    tokenizer = character_tokenizer()
    settings = SamplingSettings(seed=4, temperature=1.0)
    _, full = run(kind, settings, max_tokens=40, tokenizer=tokenizer)
    for start, length in ((5, 1), (6, 3), (11, 6)):
        stop = full.text[start : start + length]
        events, result = run(kind, settings, max_tokens=40, tokenizer=tokenizer, stop_strings=["zzz", stop])
        assert result.text == full.text[: full.text.index(stop)]
        assert "".join(event.text for event in events) == result.text
        assert result.finish_reason == "stop"
        assert result.token_ids == full.token_ids[: len(result.token_ids)]
        assert len(result.token_ids) == full.text.index(stop) + length


def test_text_of_the_events_is_the_text_of_the_result() -> None:
    events, result = run(
        "near", SamplingSettings(seed=4, temperature=1.0), max_tokens=25, tokenizer=character_tokenizer()
    )
    assert "".join(event.text for event in events) == result.text == character_tokenizer().decode(result.token_ids)


def test_the_callers_own_time_is_not_counted() -> None:
    target, events = TableTarget(random_table(VOCABULARY, 0)), []
    started = time.perf_counter()
    for event in generate(target, make_drafter("near"), PROMPT, SamplingSettings(), max_tokens=12):
        events.append(event)
        time.sleep(0.05)
    elapsed = time.perf_counter() - started
    result = events[-1].result
    assert result is not None
    assert 0 < result.prefill_seconds + result.draft_seconds + result.verify_seconds < result.seconds
    assert result.seconds < elapsed - 0.05 * len(events)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 64}, "prompt has 64 tokens"),
        ({"prompt": [1, VOCABULARY]}, "outside the vocabulary"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_strings": ["x"]}, "need a tokenizer"),
        ({"stop_strings": ["x", ""], "tokenizer": character_tokenizer()}, "must not be empty"),
    ],
)
def test_bad_arguments_are_named_before_any_work(arguments: dict[str, object], message: str) -> None:
    target = TableTarget(random_table(VOCABULARY, 0))
    with pytest.raises(ValueError, match=message):
        generate(target, None, arguments.pop("prompt", PROMPT), SamplingSettings(), **{"max_tokens": 4, **arguments})  # type: ignore[arg-type]
    assert target.forward_tokens == []


@pytest.mark.parametrize(
    "choice", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}], ids=["greedy", "coupled", "p/q"]
)
def test_a_ban_on_every_draft_token_does_not_end_the_answer(choice: dict[str, object]) -> None:
    """The reduced drafter knows tokens 0, 2 and 3 only; the target has 1 and 4 left."""
    banned = dict.fromkeys((0, 2, 3), -float("inf"))
    settings = SamplingSettings(logit_bias=banned, **choice)  # type: ignore[arg-type]
    result = run("reduced", settings, max_tokens=12)[1]
    assert len(result.token_ids) == 12
    assert set(result.token_ids) <= {1, 4}
    assert result.accepted == 0
    if choice != {"temperature": 1.0}:
        assert result.token_ids == run("none", settings, max_tokens=12)[1].token_ids

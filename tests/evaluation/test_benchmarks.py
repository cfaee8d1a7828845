from __future__ import annotations

import json
from collections import Counter

import pytest

from dspark.evaluation import benchmarks
from dspark.evaluation.benchmarks import BENCHMARKS, DOMAINS, load_prompts, prompts_digest
from dspark.training.data.conversations import Conversation
from dspark.training.data.hub import HubDataset, HubPrompts


@pytest.fixture
def directory(tmp_path):
    for name, count in (("gsm8k", 9), ("mt-bench", 3), ("mine", 2)):
        lines = [json.dumps({"turns": [f"{name} {n}"] * (2 if name == "mt-bench" else 1)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_built_in_prompts_cover_the_domains_and_have_conversations():
    prompts = load_prompts("builtin")
    assert Counter(prompt.domain for prompt in prompts) == dict.fromkeys(DOMAINS, 8)
    for domain in DOMAINS:
        assert any(len(prompt.turns) > 1 for prompt in prompts if prompt.domain == domain)
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)


def test_benchmarks_come_from_a_directory_with_their_domain_and_all_turns(directory):
    prompts = load_prompts("mt-bench, gsm8k", directory=directory)
    assert [prompt.benchmark for prompt in prompts] == ["mt-bench"] * 3 + ["gsm8k"] * 9
    assert prompts[0].domain == "chat"
    assert prompts[0].turns == ("mt-bench 0", "mt-bench 0")
    assert prompts[-1].id == "gsm8k/8"
    assert {prompt.domain for prompt in load_prompts(str(directory))} == {"math", "chat", "other"}
    assert load_prompts(str(directory / "gsm8k.jsonl")) == prompts[3:]


def test_a_limit_is_a_choice_by_seed_that_larger_limits_keep(directory):
    few, more = (load_prompts("gsm8k", directory=directory, limit=limit, seed=3) for limit in (2, 5))
    assert len(few) == 2
    assert {prompt.id for prompt in few} < {prompt.id for prompt in more}
    assert few == load_prompts("gsm8k", directory=directory, limit=2, seed=3)
    choices = {tuple(p.id for p in load_prompts("gsm8k", directory=directory, limit=2, seed=n)) for n in range(9)}
    assert len(choices) > 1
    assert Counter(prompt.domain for prompt in load_prompts("builtin", limit=6)) == dict.fromkeys(DOMAINS, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", "gsm8k"),
        ("", "neither builtin"),
        ("builtin,builtin", "called builtin"),
        ("arena-hard-v2", r"arena-hard-v2\.jsonl"),
    ],
)
def test_what_is_no_source_is_an_error_that_says_what_is(spec, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(spec)


def test_other_errors(tmp_path):
    with pytest.raises(ValueError, match="limit is 0"):
        load_prompts("builtin", limit=0)
    with pytest.raises(ValueError, match="no JSONL"):
        load_prompts(str(tmp_path))
    with pytest.raises(ValueError, match="not a directory"):
        load_prompts("builtin", directory=tmp_path / "missing")


def test_what_the_directory_lacks_comes_from_the_hub_in_the_benchmarks_wording(directory, monkeypatch):
    asked = []

    def read_hub(dataset):
        asked.append(dataset)
        row = Conversation(user_turns=("Let {x} be 2.",))
        return HubPrompts(conversations=(row,), column="problem", unusable=0)

    monkeypatch.setattr(benchmarks, "read_hub", read_hub)
    gsm8k, *_, math500 = load_prompts("gsm8k,math500", directory=directory)
    assert gsm8k.turns == ("gsm8k 0",)
    assert asked == [HubDataset.parse(BENCHMARKS["math500"].hub)]
    assert math500.turns[0].startswith("Let {x} be 2.\n")
    assert math500.turns[0].endswith("\\boxed{}.")
    assert math500.domain == "math"


@pytest.mark.parametrize("name", [name for name, benchmark in BENCHMARKS.items() if benchmark.hub is not None])
def test_every_hub_name_can_be_read(name):
    dataset = HubDataset.parse(BENCHMARKS[name].hub)
    assert dataset.column is not None
    assert "{x}" in BENCHMARKS[name].template.format(prompt="{x}")
    assert BENCHMARKS[name].domain in DOMAINS


def test_the_digest_sees_every_change(directory):
    prompts = load_prompts("gsm8k", directory=directory)
    assert prompts_digest(prompts) == prompts_digest(load_prompts("gsm8k", directory=directory))
    assert prompts_digest(prompts) != prompts_digest(prompts[:-1])

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dspark.training.data.plan import derived_fraction, derived_seed, plan_rows
from dspark.training.data.prompts import SelfPrompts, file_prompts, parse_sources, self_prompt_sources
from dspark.training.data.settings import DataSettings
from dspark.training.data.steering import SteeringPrompt, built_in_steering
from tests.training.data.fakes import SELF, write_prompts


def test_sources_from_the_command_line(tmp_path: Path) -> None:
    write_prompts(tmp_path / "some.jsonl")
    sources = parse_sources(["self=3", f"{tmp_path / 'some.jsonl'}=0.5", "self-code"][:2])
    assert {source.name: source.share for source in sources} == {
        "self-math": 1.0, "self-code": 1.0, "self-chat": 1.0, "some": 0.5,
    }  # fmt: skip
    assert [source.name for source in parse_sources(["self-code=2"])] == ["self-code"]
    for specs, message in (
        (["self-poetry"], "no source self-poetry"),
        (["self", "self-code"], "two sources are called self-code"),
        (["self=0"], "share of source self-math must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_sources(specs)
    with pytest.raises(FileNotFoundError, match="there is no prompt file"):
        parse_sources(["nowhere.jsonl"])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl: no prompt in it"):
        parse_sources([str(tmp_path / "empty.jsonl")])


def test_the_built_in_steering_is_varied_and_balanced() -> None:
    steering = built_in_steering()
    assert set(steering) == {"math", "code", "chat"}
    assert sum(map(len, steering.values())) >= 24
    systems = [prompt.system for prompts in steering.values() for prompt in prompts]
    assert len(set(systems)) == len(systems)
    assert len({source.share for source in self_prompt_sources()}) == 1


def test_steering_prompts_are_drawn_by_weight() -> None:
    drawn = Counter(SELF.pick(derived_fraction(0, str(number), "x")).system for number in range(3000))
    assert drawn["You count."] == pytest.approx(2000, abs=120)
    assert SELF.pick(0.0).system == "You count."
    assert SELF.pick(0.999999).system == "You add."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system": " "}, "system is empty"),
        ({"weight": 0.0}, "weight must be positive"),
        ({"openers": ("Count ",)}, "without space around"),
        ({"openers": ()}, "openers must be one or more"),
        ({"closers": ()}, "closers must be one or more"),
    ],
)
def test_a_wrong_steering_prompt_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SteeringPrompt(**({"system": "You count."} | fields))


def test_a_source_name_can_be_an_id() -> None:
    with pytest.raises(ValueError, match="without '/'"):
        SelfPrompts(name="a/b", steering=SELF.steering)
    with pytest.raises(ValueError, match="at least one steering prompt"):
        SelfPrompts(name="a", steering=())


def test_a_plan_mixes_by_share_and_a_longer_one_begins_with_the_shorter(tmp_path: Path) -> None:
    write_prompts(tmp_path / "some.jsonl")
    sources = parse_sources(["self=6", f"{tmp_path / 'some.jsonl'}=1"])
    long = [row.id for row in plan_rows(sources, rows=40, seed=1)]
    assert [row.id for row in plan_rows(sources, rows=20, seed=1)] == long[:20]
    assert Counter(row_id.split("/")[0] for row_id in long[:21]) == {
        "self-math": 6, "self-code": 6, "self-chat": 6, "some": 3,
    }  # fmt: skip
    assert len(set(long)) == 40
    assert {row_id for row_id in long if row_id.startswith("some")} == {f"some/{number:06d}" for number in range(4)}


def test_a_plan_ends_when_the_files_are_used_up(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "some.jsonl")
    plans = [[row.prompt_number for row in plan_rows([source], rows=9, seed=seed)] for seed in range(6)]
    assert all(sorted(plan) == [0, 1, 2, 3] for plan in plans)
    assert len({tuple(plan) for plan in plans}) > 1


def test_derived_seeds_are_unrelated_and_in_range() -> None:
    seeds = {derived_seed(seed, row, purpose) for seed in range(9) for row in ("a/1", "a/2") for purpose in ("x", "y")}
    assert len(seeds) == 36
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert derived_seed(0, "a/1", "x") == derived_seed(0, "a/1", "x")


def test_file_prompts_can_be_named(tmp_path: Path) -> None:
    write_prompts(tmp_path / "some.jsonl")
    assert file_prompts(tmp_path / "some.jsonl", name="other").name == "other"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 0}, "rows must be at least 1"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"seed": -1}, "seed must not be negative"),
        ({"temperatures": ()}, "at least one temperature"),
        ({"temperatures": (-0.5,)}, "temperatures"),
        ({"user_top_p": 0.0}, "user_top_p must lie in"),
        ({"steered_answer_fraction": 1.1}, "steered_answer_fraction must lie in"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**({"rows": 5} | fields))

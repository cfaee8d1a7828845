"""``dspark demo``: what it measures, and what it shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from dspark.cli.comparison import Comparison, Report
from dspark.cli.demo_display import AcceptedText, Display
from dspark.cli.prompts import Prompt
from dspark.engine.result import GenerationResult, RoundEvent
from tests.cli.tokenizer import character_tokenizer

PLAIN = GenerationResult(
    text="abcd",
    token_ids=(0, 1, 2, 3, 4),
    finish_reason="length",
    prompt_tokens=3,
    rounds=4,
    drafted=0,
    verified=0,
    accepted=0,
    accepted_length=1.0,
    seconds=2.0,
    prefill_seconds=0.5,
    draft_seconds=0.0,
    schedule_seconds=0.0,
    verify_seconds=1.5,
    commit_seconds=0.0,
    accepted_per_position=(),
    reached_per_position=(),
    verified_per_position=(),
)
SPECULATIVE = replace(
    PLAIN,
    rounds=2,
    drafted=6,
    verified=6,
    accepted=2,
    accepted_length=2.0,
    seconds=1.0,
    accepted_per_position=(2, 0, 0),
    reached_per_position=(2, 2, 0),
    verified_per_position=(2, 2, 2),
)


def comparison(*, tokens: tuple[int, ...] = PLAIN.token_ids) -> Comparison:
    return Comparison(
        prompt=Prompt(turns=("hi",), domain="chat"), plain=PLAIN, speculative=replace(SPECULATIVE, token_ids=tokens)
    )


def displayed(report: Report) -> str:
    stream = io.StringIO()
    Display(console=Console(file=stream, width=100)).report(report)
    return stream.getvalue()


def event(token_ids, text, accepted):
    return RoundEvent(token_ids=token_ids, text=text, accepted=accepted, drafted=3, verified=3)


class TestReport:
    def test_pools_over_prompts(self):
        report = Report(comparisons=(comparison(), comparison()), repeatable=True)
        assert report.plain_tokens_per_second == 2.5
        assert report.speculative_tokens_per_second == 5.0
        assert report.speed_up == 2.0
        assert report.accepted_length == 2.0
        assert report.accepted_per_position == (4, 0, 0)
        assert report.reached_per_position == (4, 4, 0)
        assert report.verified_per_position == (4, 4, 4)
        assert report.to_json()["identical"] is True

    @pytest.mark.parametrize(
        ("tokens", "first"), [((0, 1, 9, 3, 4), 2), ((0, 1), 2), ((0, 1, 2, 3, 4, 5), 5), ((0, 1, 2, 3, 4), None)]
    )
    def test_first_difference(self, tokens, first):
        assert comparison(tokens=tokens).first_difference == first

    def test_identical_outputs_are_said_to_be(self):
        text = displayed(Report(comparisons=(comparison(), comparison()), repeatable=True))
        assert "Both outputs were identical, token for token, for all 2 prompts." in text
        assert "2.00x" in text
        assert "2/2" in text
        assert "100%" in text

    def test_a_difference_is_not_hidden(self):
        report = Report(comparisons=(comparison(), comparison(tokens=(0, 1, 9, 3, 4))), repeatable=True)
        assert report.to_json()["identical"] is False
        assert report.to_json()["prompts"][1]["first_difference"] == 2
        assert "Outputs DIFFER for 1 of 2 prompts: prompt 2 from token 2." in displayed(report)

    def test_samples_without_a_seed_are_not_compared(self):
        report = Report(comparisons=(comparison(tokens=(7,)),), repeatable=False)
        assert report.to_json()["identical"] is None
        assert "Outputs were not compared" in displayed(report)


class TestMarking:
    def test_accepted_text_is_split_from_the_targets_own(self):
        a, b, c, d, e = range(5)
        splitter = AcceptedText(character_tokenizer())
        assert splitter.split(event((a,), "a", 0)) == ("", "a")
        assert splitter.split(event((b, c, d), "bcd", 2)) == ("bc", "d")
        assert splitter.split(event((e,), "e", 0)) == ("", "e")

    def test_text_that_lags_behind_is_marked_as_far_as_it_is_shown(self):
        splitter = AcceptedText(character_tokenizer())
        assert splitter.split(event((0, 1, 2), "a", 2)) == ("a", "")
        assert splitter.split(event((3, 4), "bcde", 1)) == ("bcd", "e")

    @pytest.mark.parametrize("terminal", [False, True])
    def test_marks(self, terminal):
        stream = io.StringIO()
        display = Display(console=Console(file=stream, force_terminal=terminal, color_system="standard", width=20))
        display.increment("draft", accepted=True)
        display.increment(" own [bold]", accepted=False)
        assert stream.getvalue() == ("\x1b[4;32mdraft\x1b[0m own [bold]" if terminal else "«draft» own [bold]")


class TestCommand:
    @pytest.fixture
    def arguments(self, tiny_target, tiny_drafter, prompts_file):
        models = ["--target", tiny_target, "--drafter", tiny_drafter]
        return ["demo", "--max-tokens", 8, "--prompts", prompts_file, *models]

    def test_json(self, dspark, arguments, tiny_target):
        run = dspark(*arguments, "--json")
        assert run.code == 0
        assert run.said == ""
        report = json.loads(run.out)
        assert report["identical"] is True
        assert report["target"] == str(tiny_target)
        assert report["environment"].keys() >= {"dspark", "torch", "threads"}
        assert [prompt["prompt"] for prompt in report["prompts"]] == ["one and two", "first"]
        assert report["prompts"][0]["plain"]["drafted"] == 0 < report["prompts"][0]["speculative"]["drafted"]
        assert len(report["verified_per_position"]) == 5

    def test_shows_both_answers_and_the_tables(self, dspark, arguments):
        run = dspark(*arguments)
        assert run.code == 0
        for text in ("math (1 of 2)", "target alone", "with DSpark", "speed-up", "Acceptance by position", "identical"):
            assert text in run.out

    def test_seeded_sampling_is_compared(self, dspark, arguments):
        assert json.loads(dspark(*arguments, "--json", "--temperature", 1, "--seed", 5).out)["identical"] is True

    def test_unseeded_sampling_is_not(self, dspark, arguments):
        assert json.loads(dspark(*arguments, "--json", "--temperature", 1).out)["identical"] is None

    def test_interrupt_shows_what_there_is(self, dspark, arguments, monkeypatch):
        shown = Display.prompt

        def interrupt_at_the_second(self, place, prompt):
            if place.startswith("2"):
                raise KeyboardInterrupt
            shown(self, place, prompt)

        monkeypatch.setattr(Display, "prompt", interrupt_at_the_second)
        run = dspark(*arguments)
        assert run.code == 130
        assert "identical, token for token, for all 1 prompts" in run.out

    def test_without_a_drafter_there_is_nothing_to_compare(self, dspark, tiny_target):
        run = dspark("demo", "--target", tiny_target, "--drafter", "none")
        assert run.code == 2
        assert "--drafter none leaves nothing to compare" in run.err

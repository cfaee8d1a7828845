"""``dspark generate`` on a tiny random target and its drafter."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest

from dspark.models import instructions as instruction_sets
from dspark.models.instructions import AVX2, AVX512_VNNI

REQUIRED = {
    "text",
    "token_ids",
    "finish_reason",
    "rounds",
    "drafted",
    "verified",
    "accepted",
    "accepted_length",
    "seconds",
}


@pytest.fixture
def models(tiny_target, tiny_drafter):
    return ["--target", tiny_target, "--drafter", tiny_drafter]


def test_less_speculation_changes_the_counts_and_not_the_words(dspark, models):
    arguments = ["generate", "hello", "--max-tokens", 16, "--json", *models]
    whole, short, none = (
        json.loads(dspark(*arguments, *extra).out)
        for extra in ([], ["--max-draft-tokens", 1], ["--confidence-threshold", 1.0])
    )
    assert whole["text"] == short["text"] == none["text"]
    assert short["drafted"] < whole["drafted"]
    assert none["verified"] < none["drafted"]
    run = dspark("generate", "hello", *models, "--confidence-threshold", 2)
    assert run.code == 2
    assert "confidence_threshold must be a probability" in run.err


@pytest.mark.parametrize(("instructions", "tokens"), [(AVX512_VNNI, 4), (AVX2, 3)], ids=["avx512vnni", "avx2"])
def test_in_int8_few_tokens_are_drafted_unless_asked_otherwise(dspark, monkeypatch, instructions, tokens):
    monkeypatch.setattr(instruction_sets, "INSTRUCTIONS", instructions)  # nothing is compiled for them any more
    arguments = ["generate", "hello", "--max-tokens", 16, "--json", "--dtype", "int8"]  # of ours: its block is longer
    usual, same, more, threshold = (
        json.loads(dspark(*arguments, *extra).out)
        for extra in (
            [], ["--max-draft-tokens", tokens], ["--max-draft-tokens", tokens + 1], ["--confidence-threshold", 0.0]
        )
    )  # fmt: skip
    assert usual["text"] == more["text"]
    assert (usual["rounds"], usual["drafted"]) == (same["rounds"], same["drafted"])
    assert usual["drafted"] / usual["rounds"] <= tokens < more["drafted"] / more["rounds"]
    assert threshold["drafted"] / threshold["rounds"] > tokens  # a threshold looks at the whole block


def test_json_has_what_machines_need(dspark, models):
    run = dspark("generate", "hello", "--max-tokens", 12, "--json", *models)
    assert run.code == 0
    assert run.said == ""
    result = json.loads(run.out)
    assert result.keys() >= REQUIRED
    assert len(result["token_ids"]) == 12
    assert result["finish_reason"] == "length"
    assert result["drafted"] >= result["verified"] >= result["accepted"] >= 0
    assert result["drafted"] > 0


@pytest.mark.parametrize("sampling", [[], ["--temperature", 1, "--top-k", 40, "--seed", 3]])
def test_no_speculation_gives_the_same_output(dspark, models, sampling):
    arguments = ["generate", "hello", "--max-tokens", 16, "--json", *models, *sampling]
    speculative, alone = json.loads(dspark(*arguments).out), json.loads(dspark(*arguments, "--no-speculation").out)
    assert speculative["token_ids"] == alone["token_ids"]
    assert speculative["text"] == alone["text"]
    assert alone["drafted"] == alone["accepted"] == 0


def test_a_confidence_threshold_verifies_less_and_changes_nothing_else(dspark, models):
    arguments = ["generate", "hello", "--max-tokens", 24, "--json", *models]
    whole, pruned = (json.loads(dspark(*arguments, *more).out) for more in ([], ["--confidence-threshold", 0.999]))
    assert pruned["token_ids"] == whole["token_ids"]
    assert whole["verified"] == whole["drafted"]
    assert pruned["verified"] < pruned["drafted"]
    run = dspark(*arguments, "--confidence-threshold", 1.5)
    assert run.code == 2
    assert "confidence_threshold must be a probability" in json.loads(run.out)["error"]


def test_drafter_none_is_no_speculation(dspark, tiny_target):
    run = dspark("generate", "hello", "--max-tokens", 3, "--json", "--target", tiny_target, "--drafter", "none")
    assert json.loads(run.out)["drafted"] == 0


def test_streams_the_text_to_stdout_and_the_numbers_to_stderr(dspark, models):
    text = json.loads(dspark("generate", "hello", "--max-tokens", 12, "--json", *models).out)["text"]
    run = dspark("generate", "hello", "--max-tokens", 12, *models)
    assert run.out == text + "\n"
    assert run.said.startswith("[12 tokens in ")
    assert "accepted length" in run.err
    assert "accepted length" not in dspark("generate", "hello", "--max-tokens", 4, *models, "--no-speculation").err


def test_prompt_from_standard_input(dspark, models, monkeypatch):
    expected = json.loads(dspark("generate", "hello", "--max-tokens", 4, "--json", *models).out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    run = dspark("generate", "-", "--max-tokens", 4, "--json", *models)
    assert json.loads(run.out)["token_ids"] == expected["token_ids"]


def test_prompts_file_gives_a_line_for_each_turn(dspark, models, prompts_file):
    run = dspark("generate", "--prompts", prompts_file, "--max-tokens", 4, "--json", *models)
    results = [json.loads(line) for line in run.out.splitlines()]
    assert [(result["prompt"], result["turn"]) for result in results] == [(0, 0), (1, 0), (1, 1)]
    # The last turn sees the first one and its answer: 2 x <u>, 2 x <a>, the words, and 4 answer tokens.
    assert results[2]["prompt_tokens"] > results[1]["prompt_tokens"] + len("<u>then<a>")

    run = dspark("generate", "--prompts", prompts_file, "--max-tokens", 4, *models)
    assert run.said.startswith("[3 answers, 12 tokens in ")


def test_system_and_raw_change_the_prompt(dspark, models):
    def prompt_tokens(*arguments):
        run = dspark("generate", "hello", "--max-tokens", 1, "--json", *models, *arguments)
        return json.loads(run.out)["prompt_tokens"]

    assert prompt_tokens() == len("<u>hello<a>")
    assert prompt_tokens("--system", "be kind") == len("<s>be kind<u>hello<a>")
    assert prompt_tokens("--raw") == len("hello")


def test_stop_strings_end_the_answer_before_them(dspark, models):
    text = json.loads(dspark("generate", "hello", "--max-tokens", 24, "--json", *models).out)["text"]
    first, second = text[3:5], text[8:10]
    run = dspark("generate", "hello", "--max-tokens", 24, "--json", *models, "--stop", second, "--stop", first)
    result = json.loads(run.out)
    assert result["finish_reason"] == "stop"
    assert result["text"] == text[: min(text.index(first), text.index(second))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--max-tokens", 0], "max_tokens"), (["--temperature", -1], "temperature"), (["--min-p", 2], "min_p")],
)
def test_values_out_of_range_are_named(dspark, models, arguments, message):
    run = dspark("generate", "hello", *models, *arguments)
    assert run.code == 2
    assert message in run.err


def test_a_prompt_longer_than_the_context_is_an_error(dspark, models):
    run = dspark("generate", "x" * 600, *models)
    assert run.code == 2
    assert "512" in run.err


def test_a_device_that_is_not_there_is_named(dspark, models):
    run = dspark("generate", "hello", *models, "--device", "quantum")
    assert run.code == 2
    assert "device 'quantum' cannot be used here" in run.err


def test_a_damaged_checkpoint_is_named(dspark, tiny_target, tmp_path):
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    run = dspark("generate", "hello", "--target", copy, "--drafter", "none")
    assert run.code == 2
    assert f"{copy / 'model.safetensors'} is damaged" in run.err


def test_a_conversation_that_the_template_refuses_is_an_error(dspark, tiny_target, tmp_path):
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    for file in copy.glob("*.jinja"):
        file.write_text("{{ raise_exception('no system role') }}")
    run = dspark("generate", "hello", "--target", copy, "--drafter", "none", "--system", "be kind")
    assert run.code == 2
    assert "no system role" in run.err

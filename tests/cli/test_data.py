"""``dspark data`` on a tiny random target."""

from __future__ import annotations

import json
import shutil

import pytest

from dspark.training.data import read_rows
from tests.cli.tokenizer import CHAT_TEMPLATE, character_tokenizer


@pytest.fixture(scope="session")
def chat_target(tiny_target, tmp_path_factory):
    """The tiny target with a tokenizer whose template ends each turn with a special token."""
    directory = tmp_path_factory.mktemp("target") / "chat"
    shutil.copytree(tiny_target, directory)
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "<mask>"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content }}<mask>")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def small(chat_target):
    return [
        "--target",
        chat_target,
        "--dtype",
        "float32",
        "--max-tokens",
        8,
        "--max-length",
        400,
        "--temperatures",
        "0,1",
    ]


def test_rows_from_a_file_have_every_answer(dspark, small, prompts_file, tmp_path):
    run = dspark("data", tmp_path / "out", "--rows", 2, "--source", prompts_file, "--json", *small)
    assert (run.code, run.err) == (0, "")
    manifest = json.loads(run.out)
    assert manifest["complete"]
    assert not manifest["interrupted"]
    assert manifest["rows"] + sum(manifest["dropped"].values()) == 2
    rows = {row.id: row for row in read_rows(tmp_path / "out", vocab_size=211)}
    assert sum(row.response_tokens for row in rows.values()) == manifest["response_tokens"] > 0
    assert rows["prompts/000001"].user_turns == ("first", "then")
    assert len(rows["prompts/000001"].response_spans) == 2


def test_self_prompting_runs_and_reports_what_it_dropped(dspark, small, tmp_path):
    run = dspark("data", tmp_path / "out", "--rows", 3, "--max-prompt-tokens", 6, *small)
    assert (run.code, run.out) == (0, "")
    assert f"{tmp_path / 'out'}: " in run.err
    assert "3/3 rows" in run.err
    assert "dropped: " in run.err


def test_the_same_command_goes_on_and_others_are_refused(dspark, small, prompts_file, tmp_path):
    command = ["data", tmp_path / "out", "--source", prompts_file, "--json", *small]
    first = json.loads(dspark(*command, "--rows", 1).out)
    second = json.loads(dspark(*command, "--rows", 2).out)
    assert (first["done"], second["done"]) == (1, 2)
    run = dspark(*command, "--rows", 2, "--seed", 5)
    assert run.code == 2
    assert "settings.seed was 0 and now is 5" in json.loads(run.out)["error"]


def test_fewer_prompts_than_rows_is_said(dspark, small, prompts_file, tmp_path):
    run = dspark("data", tmp_path / "out", "--rows", 50, "--source", prompts_file, *small)
    assert "only 2 of the 50 rows could be planned" in run.err


def test_a_forbidden_prompt_is_dropped(dspark, small, prompts_file, tmp_path):
    command = ["data", tmp_path / "out", "--rows", 2, "--source", prompts_file, "--json", *small]
    manifest = json.loads(dspark(*command, "--forbid", prompts_file).out)
    assert manifest["dropped"] == {"forbidden_prompt": 2}


def test_ctrl_c_says_how_to_go_on(dspark, small, prompts_file, tmp_path, monkeypatch):
    def interrupt(self, requests):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("dspark.engine.batch.BatchGenerator.run", interrupt)
    run = dspark("data", tmp_path / "out", "--rows", 2, "--source", prompts_file, *small)
    assert run.code == 130
    assert "interrupted after 0 of 2 rows; the same command goes on." in run.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", 0], "rows must be at least 1"),
        (["--temperatures", "warm"], "--temperatures must be numbers separated by commas"),
        (["--max-concurrency", 0], "--max-concurrency must be at least 1"),
        (["--source", "nowhere.jsonl"], "there is no prompt file nowhere.jsonl"),
        (["--source", "self-poetry"], "there is no source self-poetry"),
        (["--forbid", "nowhere.jsonl"], "there is no prompt file nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line(dspark, tmp_path, arguments, message):
    run = dspark("data", tmp_path / "out", *arguments)
    assert run.code == 2
    assert message in run.err
    assert not (tmp_path / "out").exists()


def test_a_length_beyond_the_context_is_refused(dspark, tiny_target, tmp_path):
    run = dspark("data", tmp_path / "out", "--target", tiny_target, "--dtype", "float32", "--max-length", 100000)
    assert run.code == 2
    assert "the target's context is" in run.err


def test_help_teaches(dspark):
    run = dspark("data", "--help")
    assert run.code == 0
    assert "Let the target write training data" in run.out
    assert "[default: self]" in run.out

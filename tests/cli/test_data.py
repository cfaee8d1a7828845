"""``dspark data`` on a tiny random target."""

from __future__ import annotations

import json
import shutil

import pytest

from dspark.training.data import read_rows
from tests.cli.tokenizer import CHAT_TEMPLATE, character_tokenizer
from tests.training.data.endpoint_server import MODEL, FakeServer, Fault
from tests.training.data.fakes import make_tokenizer


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
        (["--forbid", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
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


class TestEndpoint:
    """The target is served elsewhere; here there is its tokenizer and its config."""

    @pytest.fixture
    def weightless_target(self, tmp_path):
        directory = tmp_path / "weightless"
        make_tokenizer().save_pretrained(directory)
        config = {"vocab_size": 259, "max_position_embeddings": 500, "eos_token_id": 2}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    @pytest.fixture
    def server(self):
        with FakeServer() as server:
            yield server

    @pytest.fixture
    def command(self, weightless_target, server, tmp_path):
        command = ["data", tmp_path / "out", "--target", weightless_target, "--endpoint", server.url]
        return [*command, "--max-length", 500, "--rows", 4]

    def test_rows_are_made_without_the_weights(self, dspark, command, server, prompts_file, tmp_path):
        run = dspark(*command, "--source", prompts_file, "--json")
        assert (run.code, run.err) == (0, "")
        manifest = json.loads(run.out)
        assert manifest["complete"]
        target = manifest["recipe"]["target"]
        assert target["endpoint"] == {"api": "completions", "dialect": "vllm", "model": MODEL}
        assert (target["dtype"], target["vocab_size"]) == ("remote", 259)
        rows = read_rows(tmp_path / "out", vocab_size=259)
        assert len(rows) == manifest["rows"] > 0
        again = dspark(*command, "--source", prompts_file, "--json", "--endpoint-api", "chat")
        assert "target.endpoint.api was 'completions' and now is 'chat'" in json.loads(again.out)["error"]

    def test_self_prompting_works_through_it(self, dspark, command, server):
        run = dspark(*command, "--max-prompt-tokens", 60)
        assert run.code == 0
        assert "4/4 rows" in run.err
        assert len(server.bodies) >= 4

    def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
        self, dspark, command, server, prompts_file, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("MY_KEY", "sk-secret")
        run = dspark(*command, "--source", prompts_file, "--api-key-env", "MY_KEY")
        assert run.code == 0
        assert set(server.keys) == {"Bearer sk-secret"}
        assert "sk-secret" not in run.out + run.err
        assert not any("sk-secret" in file.read_text() for file in (tmp_path / "out").glob("*.*"))
        run = dspark(*command, "--source", prompts_file, "--api-key-env", "NO_KEY")
        assert run.code == 2
        assert "--api-key-env names NO_KEY, but no such environment variable is set" in run.err

    def test_a_refusal_is_one_line(self, dspark, command, server, prompts_file):
        server.fault = lambda number: Fault(status=401, body='{"error": {"message": "bad key"}}')
        run = dspark(*command, "--source", prompts_file)
        assert run.code == 2
        assert f"dspark: {server.url}/completions answered 401: bad key. Name the environment variable" in run.err

    def test_text_without_ids_is_said(self, dspark, command, server, prompts_file):
        server.style = "text"
        run = dspark(*command, "--source", prompts_file, "--endpoint-dialect", "openai")
        assert run.code == 0
        assert "texts came without token ids" in run.err

    def test_waiting_is_said(self, dspark, command, server, prompts_file):
        server.fault = lambda number: Fault(status=503) if not number else None
        run = dspark(*command, "--source", prompts_file)
        assert run.code == 0
        assert "answered 503: the fake is unwell; trying again in" in run.err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--model", "other"], f"has no model other; it has {MODEL}"),
            (["--endpoint-api", "chat"], "--endpoint-api chat cannot let the target write user messages"),
            (["--max-length", 501], "--max-length is 501, but the target's context is 500 tokens"),
            (["--endpoint-tries", 0], "attempts must be at least 1"),
            (["--endpoint", "nowhere"], "must be a URL like http://localhost:8000/v1"),
        ],
    )
    def test_a_mistake_is_found_before_anything_is_written(self, dspark, command, tmp_path, arguments, message):
        run = (
            dspark(*command, *arguments)
            if "--endpoint" not in arguments and "--max-length" not in arguments
            else (
                dspark(*command[:4], *(["--endpoint", command[5]] if "--endpoint" not in arguments else []), *arguments)
            )
        )
        assert run.code == 2
        assert message in run.err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("option", ["--model", "--api-key-env"])
    def test_options_of_an_endpoint_need_one(self, dspark, tmp_path, option):
        run = dspark("data", tmp_path / "out", option, "x")
        assert run.code == 2
        assert f"{option} belongs to an --endpoint" in run.err


def test_unusable_rows_of_a_hub_data_set_are_said(dspark, small, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"prompt": "one"}, {"prompt": " "}]))
    run = dspark("data", tmp_path / "out", "--rows", 1, "--source", "hub:owner/name", *small)
    assert run.code == 0
    assert (
        "note: 1 of the 2 rows read from hub:owner/name:train:prompt have no usable prompt and are left out" in run.err
    )


def test_a_prompt_file_with_system_messages_needs_a_template_for_them(dspark, small, chat_target, tmp_path):
    directory = tmp_path / "target"
    shutil.copytree(chat_target, directory)
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (directory / "chat_template.jinja").write_text(template + (directory / "chat_template.jinja").read_text())
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    run = dspark("data", tmp_path / "out", "--rows", 1, "--source", file, *small[2:], "--target", directory)
    assert run.code == 2
    assert "1 of the 1 prompts of prompts have a system message" in run.err
    assert "no system role" in run.err

"""``dspark eval`` on a tiny model."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from dspark.engine import answering

TIMES = {
    "seconds", "milliseconds_per_round", "tokens_per_second", "decode_tokens_per_second", "speed_up",
    "end_to_end_speed_up", "speed_ratio", "sessions", "mean_of_domains",
}  # fmt: skip


def without_times(content):
    if isinstance(content, dict):
        return {key: without_times(value) for key, value in content.items() if key not in TIMES}
    return [without_times(part) for part in content] if isinstance(content, list) else content


@pytest.fixture
def evaluate(dspark, tiny_target, tiny_drafter, prompts_file):
    def run(*more, drafters=(tiny_drafter,), prompts=prompts_file):
        named = [word for drafter in drafters for word in ("--drafter", drafter)]
        models = ("--target", tiny_target, *named, "--dtype", "float32")
        length = () if "--max-tokens" in more else ("--max-tokens", 12)
        return dspark("eval", "--prompts", prompts, *models, *length, *more)

    return run


def test_the_numbers_are_those_of_the_answers(evaluate, tmp_path):
    run = evaluate("--json", "--out", tmp_path / "out")
    assert run.code == 0, run.err
    report = json.loads(run.out)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    (arm,) = report["arms"]
    overall = arm["overall"]
    assert (report["completed"], overall["answers"], overall["tokens"]) == (2, 3, 36)
    assert set(arm["domains"]) == {"math", "other"}
    assert overall["identical"] == 3
    assert overall["committed"] == overall["tokens"] - overall["answers"]
    assert overall["accepted_length"]["value"] == pytest.approx(overall["committed"] / overall["rounds"])
    assert overall["accepted"] <= overall["verified"] == overall["drafted"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    rounds = [r for line in lines if line["arm"] != "target alone" for r in line["rounds"]]
    assert len(rounds) == overall["rounds"]
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert report["reliability"]["dspark-vanilla"]["raw"]["positions"]


def test_tables_are_printed_and_nothing_is_written_without_a_directory(evaluate, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    run = evaluate("--no-baseline", "--thresholds", "0,0.5", "--draft-tokens", "1,5")
    assert run.code == 0, run.err
    for text in ("Accepted length and speed", "By draft position", "threshold 0.5", "1 drafted", "Confidence"):
        assert text in run.out
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8), ("--temperature", 0.8, "--coupled")])
def test_a_seed_gives_the_same_numbers(evaluate, sampling):
    first, second = (json.loads(evaluate("--json", "--seed", 5, *sampling).out) for _ in range(2))
    assert without_times(first) == without_times(second)
    expected = None if sampling[-1:] == (0.8,) else 3
    assert first["arms"][0]["overall"]["identical"] == expected


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_killed_evaluation_goes_on_with_the_same_numbers(evaluate, tmp_path, monkeypatch, concurrency):
    options = ("--json", "--temperature", 0.9, "--coupled", "--concurrency", concurrency, "--out")
    expected = json.loads(evaluate(*options, tmp_path / "whole").out)
    tokens_of, calls = answering.question_token_ids, []

    def dying(*arguments, **named):
        calls.append(1)
        if len(calls) == 7:  # two warm-ups, then the fifth question
            raise KeyboardInterrupt
        return tokens_of(*arguments, **named)

    monkeypatch.setattr(answering, "question_token_ids", dying)
    killed = evaluate(*options, tmp_path / "killed")
    assert killed.code == 130
    assert "goes on" in killed.err
    path = tmp_path / "killed" / "answers.jsonl"
    given = len(path.read_text().splitlines())
    assert 5 - concurrency <= given <= 4  # what is lost is what was being made
    path.write_bytes(path.read_bytes()[:-9])
    monkeypatch.setattr(answering, "question_token_ids", tokens_of)
    resumed = json.loads(evaluate(*options, tmp_path / "killed").out)
    assert without_times(resumed) == without_times(expected)
    assert len(resumed["sessions"]) == 2
    third = evaluate(*options, tmp_path / "killed")
    assert json.loads(third.out) == resumed  # nothing is left to answer, so even the times are the same


def test_many_at_once_give_the_same_numbers_and_the_throughput(evaluate):
    sampling = ("--temperature", 0.8, "--coupled", "--thresholds", "0.5")
    one, many = (json.loads(evaluate("--json", *sampling, "--concurrency", n).out) for n in (1, 3))
    assert one["speed"] == {"of": "decoding", "concurrency": 1}
    assert many["speed"] == {"of": "throughput", "concurrency": 3}
    for report in (one, many):
        del report["speed"], report["settings"]["concurrency"]
        del report["reliability"]  # confidences are a drafter's own, and may differ in the last bits
    assert without_times(many) == without_times(one)
    overall, alone = many["arms"][0]["overall"], many["target_alone"]["overall"]
    ratio = overall["tokens_per_second"]["value"] / alone["tokens_per_second"]["value"]
    assert overall["speed_up"]["value"] == pytest.approx(ratio)
    assert overall["decode_tokens_per_second"] is None
    assert one["arms"][0]["overall"]["decode_tokens_per_second"] is not None
    printed = evaluate(*sampling, "--concurrency", 3).out
    assert "Speed is throughput at 3 answers at once" in printed


def test_another_setting_is_refused(evaluate, tmp_path):
    assert evaluate("--out", tmp_path / "out").code == 0
    run = evaluate("--out", tmp_path / "out", "--temperature", 0.5)
    assert run.code == 2
    assert "other settings (temperature)" in run.err


def test_another_drafter_under_the_same_name_is_refused(evaluate, tiny_drafter, tmp_path):
    drafter = shutil.copytree(tiny_drafter, tmp_path / "mine")
    assert evaluate("--out", tmp_path / "out", drafters=(drafter,)).code == 0
    tensors = load_file(drafter / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, drafter / "model.safetensors")
    run = evaluate("--out", tmp_path / "out", drafters=(drafter,))
    assert run.code == 2
    assert "other settings (drafters)" in run.err


def test_two_drafters_are_compared(evaluate, tiny_drafter, tmp_path):
    same = shutil.copytree(tiny_drafter, tmp_path / "again" / "drafter")
    run = evaluate("--json", drafters=(tiny_drafter, same))
    assert run.code == 0, run.err
    report = json.loads(run.out)
    assert [drafter["label"] for drafter in report["drafters"]] == ["dspark-vanilla", "again"]
    (pair,) = report["comparisons"]
    assert pair["overall"]["accepted_length_difference"] == {"value": 0.0, "interval": [0.0, 0.0]}


def test_a_threshold_verifies_less(evaluate):
    report = json.loads(evaluate("--json", "--thresholds", "0,0.999", "--draft-tokens", "2").out)
    base, threshold, short = (arm["overall"] for arm in report["arms"])
    assert threshold["verified"] < threshold["drafted"]
    assert base["verified"] == base["drafted"]
    assert len(short["positions"]) == 2
    assert {arm["identical"] for arm in (base, threshold, short)} == {3}


def test_what_does_not_fit_is_left_out_and_said(evaluate, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"turns": ["x" * 5000]}) + "\n" + json.dumps({"turns": ["short"]}) + "\n")
    run = evaluate(prompts=path)
    assert run.code == 0, run.err
    assert "left out long/0" in run.out
    first, again = (json.loads(evaluate("--json", "--out", tmp_path / "out", prompts=path).out) for _ in range(2))
    assert (first["completed"], list(first["skipped"])) == (1, ["long/0"])
    assert again == first  # nothing is left to answer, so nobody else has answered


def test_the_report_does_not_say_where_the_target_lies(evaluate, tiny_target, tmp_path):
    run = evaluate("--json", "--out", tmp_path / "out")
    assert json.loads(run.out)["settings"]["target"] == tiny_target.name
    assert str(tiny_target) not in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--coupled",), "--temperature above 0"),
        (("--thresholds", "a,b"), "--thresholds a,b"),
        (("--draft-tokens", "9"), "1 to 5"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--drafter", "missing"), "no directory missing"),
        (("--limit", "0"), "limit is 0"),
        (("--temperature", "-1"), "temperature"),
    ],
)
def test_mistakes_are_one_line(evaluate, options, message):
    run = evaluate(*options)
    assert run.code == 2
    assert message in run.err
    assert len(run.err.strip().splitlines()) == 1


def test_prompts_that_are_nowhere_are_an_error(evaluate):
    run = evaluate(prompts="nothing")
    assert run.code == 2
    assert "prompts 'nothing' are neither builtin" in run.err


def test_drafters_need_names_of_their_own(evaluate, tiny_drafter, dspark, tiny_target):
    run = evaluate(drafters=(tiny_drafter, tiny_drafter))
    assert run.code == 2
    assert "LABEL=" in run.err
    run = dspark("eval", "--target", tiny_target)
    assert run.code == 2
    assert "--drafter" in run.err

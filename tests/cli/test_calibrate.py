"""``dspark calibrate`` on a tiny random target and its drafter."""

from __future__ import annotations

import json
import shutil

import pytest

from dspark.drafters import load_drafter
from dspark.models.loading import load_target

ROUNDS = "calibration-rounds.jsonl"
SHORT = ["--max-tokens", 10, "--rounds", 24, "--temperatures", "0,1"]


@pytest.fixture
def drafter(tiny_drafter, tmp_path):
    """A copy of the drafter that may be written to."""
    copy = tmp_path / "drafter"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_drafter / name, copy)
    return copy


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "held-out.jsonl"
    domains = ["math", "code", "chat"]
    rows = [{"turns": [f"number {number}"], "domain": domains[number % 3]} for number in range(12)]
    rows[0]["turns"].append("and then")
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def models(tiny_target, drafter):
    return ["--target", tiny_target, "--drafter", drafter]


def test_writes_what_every_command_then_uses(dspark, models, drafter, prompts):
    run = dspark("calibrate", *models, "--prompts", prompts, *SHORT)
    assert run.code == 0, run.err
    assert "sampling temperature 0: survival of the first k draft tokens" in " ".join(run.out.split())
    assert "temperatures by draft position" in run.out
    assert f"written: {drafter / 'calibration.json'}" in run.out
    page = (drafter / "calibration-rounds.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    assert run.err.count("rounds of 24: 24 at temperature 0, 24 at temperature 1") == 1

    content = json.loads((drafter / "calibration.json").read_text())
    assert len(content["temperatures"]) == len(content["ece_before"]) == len(content["ece_after"]) == 5
    assert content["dataset"] == "held-out.jsonl (12 prompts)"
    regimes = content["dspark"]["regimes"]
    assert [regime["sampling_temperature"] for regime in regimes] == [0.0, 1.0]
    assert content["num_samples"] == sum(regime["fit_rounds"] for regime in regimes)
    assert content["dspark"]["target"]["dtype"] == "int8"
    assert load_drafter(drafter).calibration.temperatures == tuple(content["temperatures"])

    used = dspark("generate", "hello", "--max-tokens", 3, *models)
    assert used.code == 0
    assert "dspark: confidences of the drafter are calibrated (20" in used.err
    other = dspark("generate", "hello", "--max-tokens", 3, *models, "--dtype", "float32")
    assert "they were fitted with the target in int8, and it runs in float32" in other.err
    assert other.out == dspark("generate", "hello", "--max-tokens", 3, *models, "--dtype", "float32").out


def test_the_bias_moves_in_a_drafter_of_its_own(dspark, models, drafter, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark.calibration.offset.fit_offset", lambda rounds: 0.5)  # random models accept nothing
    moved = tmp_path / "moved"
    arguments = ["calibrate", *models, "--prompts", prompts, *SHORT, "--json", "--move-bias"]
    run = dspark(*arguments, "--out", moved)
    assert run.code == 0, run.out
    assert json.loads(run.out)["dspark"]["options"]["bias_moved_by"] == 0.5
    name = "confidence_head.proj.bias"
    before, after = load_drafter(drafter), load_drafter(moved, load_target(models[1], dtype="float32").model)
    assert after.get_parameter(name).item() == pytest.approx(before.get_parameter(name).item() + 0.5, abs=1e-3)
    assert after.calibration is not None
    assert before.calibration is None
    for out in ([], ["--out", drafter]):
        refused = dspark(*arguments, *out)
        assert refused.code == 2
        assert "another than the drafter's own" in refused.out


def test_the_fit_uses_raw_confidences_whatever_calibration_there_is(dspark, models, drafter, prompts):
    arguments = ["calibrate", *models, "--prompts", prompts, *SHORT, "--json"]
    first = json.loads(dspark(*arguments).out)
    content = json.loads((drafter / "calibration.json").read_text())
    content["temperatures"] = [9.0] * 5
    content["dspark"]["drafter"]["fingerprint"] = "another"  # would not load
    (drafter / "calibration.json").write_text(json.dumps(content))
    rounds = (drafter / ROUNDS).read_bytes()
    (drafter / ROUNDS).unlink()
    run = dspark(*arguments)
    assert run.code == 0, run.out
    assert (drafter / ROUNDS).read_bytes() == rounds
    again = json.loads(run.out)
    assert again["temperatures"] == first["temperatures"]
    assert again["dspark"]["regimes"] == first["dspark"]["regimes"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_interrupted_run_goes_on(dspark, models, drafter, prompts, tmp_path, monkeypatch, concurrency):
    from dspark.engine.core import EngineCore

    step, calls = EngineCore.step, []

    def interrupted(core):
        calls.append(core)
        if len(calls) == 18:
            raise KeyboardInterrupt
        return step(core)

    arguments = ["calibrate", *models, "--prompts", prompts, *SHORT, "--concurrency", concurrency, "--json"]
    monkeypatch.setattr(EngineCore, "step", interrupted)
    run = dspark(*arguments)
    assert run.code == 130
    assert "the same command goes on from there" in run.err
    assert not (drafter / "calibration.json").exists()
    kept = (drafter / ROUNDS).read_bytes()
    assert kept.count(b'"answer":') >= 1

    monkeypatch.setattr(EngineCore, "step", step)
    resumed = json.loads(dspark(*arguments).out)
    assert (drafter / ROUNDS).read_bytes().startswith(kept)
    whole = json.loads(dspark(*arguments, "--out", tmp_path / "whole").out)
    if concurrency == 1:  # else others are drafted beside an answer, which may change the last bits of a confidence
        assert (tmp_path / "whole" / ROUNDS).read_bytes() == (drafter / ROUNDS).read_bytes()
        assert whole["temperatures"] == resumed["temperatures"]
        assert whole["dspark"]["regimes"] == resumed["dspark"]["regimes"]


def test_a_prompt_that_fills_the_context_is_left_out(dspark, models, prompts):
    with prompts.open("a") as file:
        file.write(json.dumps({"turns": ["x" * 5000]}) + "\n")
    run = dspark("calibrate", *models, "--prompts", prompts, *SHORT)
    assert run.code == 0, run.err
    assert "note: 1 of 13 prompts leave no room for an answer in the target's context: left out" in run.err


def test_benchmarks_are_refused_by_name_and_by_text(dspark, models, prompts, tmp_path):
    named = shutil.copy(prompts, tmp_path / "gsm8k.jsonl")
    run = dspark("calibrate", *models, "--prompts", named, *SHORT)
    assert run.code == 2
    assert "gsm8k is a benchmark" in run.err

    forbidden = tmp_path / "forbidden.jsonl"
    forbidden.write_text('{"turns": ["number 3"]}\n{"turns": ["number 4"]}\n')
    run = dspark("calibrate", *models, "--prompts", prompts, "--forbid", forbidden, *SHORT, "--json")
    assert run.code == 0
    assert "note: 2 of 12 prompts are (nearly) prompts of a test set: dropped" in run.err
    assert json.loads(run.out)["dataset"] == "held-out.jsonl (10 prompts)"


def test_the_prompts_of_the_package_are_no_evaluation_prompts():
    from dspark.cli.calibration_rounds import calibration_prompts

    chosen = calibration_prompts((), ())
    assert len(chosen) == 60
    domains = [name.partition("/")[0] for name in chosen]
    assert {domain: domains.count(domain) for domain in domains} == {"math": 20, "code": 20, "chat": 20}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperatures", "0;1"], "--temperatures must be numbers"),
        (["--temperatures", "-1"], "temperature"),
        (["--rounds", 0], "--rounds must be at least 1"),
        (["--max-tokens", 1], "--max-tokens at least 2"),
        (["--concurrency", 0], "--concurrency is 0"),
        (["--rounds-file", "rounds.html"], "--rounds-file rounds.html"),
    ],
)
def test_values_out_of_range_are_named(dspark, models, prompts, arguments, message):
    run = dspark("calibrate", *models, "--prompts", prompts, *arguments)
    assert run.code == 2
    assert message in run.err


def test_the_embedded_drafter_is_not_written_to(dspark):
    run = dspark("calibrate")
    assert run.code == 2
    assert "give --out DIRECTORY" in run.err


def test_a_drafter_without_confidence_head_is_refused(dspark, tiny_target, tiny_drafter, prompts):
    drafter = tiny_drafter.parent / "dflash-anchor-first"
    run = dspark("calibrate", "--target", tiny_target, "--drafter", drafter, "--prompts", prompts)
    assert run.code == 2
    assert "no confidence head" in run.err


def test_rounds_of_other_settings_are_refused(dspark, models, drafter, prompts):
    assert dspark("calibrate", *models, "--prompts", prompts, *SHORT).code == 0
    run = dspark("calibrate", *models, "--prompts", prompts, *SHORT[2:], "--max-tokens", 11)
    assert run.code == 2
    assert "max_tokens 10 (now 11); delete the file, name another one" in run.err

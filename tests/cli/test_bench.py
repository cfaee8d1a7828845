"""``dspark bench offline`` on a tiny random target and its drafter."""

from __future__ import annotations

import json

import pytest

from dspark.engine.bench import METRICS
from dspark.scheduling import StepRecord


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(dspark, tiny_target, tiny_drafter, prompts_file):
    """A command that makes few steps; what is given twice counts as given last."""

    def run(*more, models=("--target", tiny_target, "--drafter", tiny_drafter)):
        short = {"--prompts": prompts_file, "--max-tokens": 6, "--requests": 2, "--rounds": 2, "--concurrency": "1,3"}
        short |= {"--policies": "off,fixed:2"}
        words = [word for name, value in short.items() if name not in more for word in (name, value)]
        return dspark("bench", "offline", *models, *words, *more)

    return run


def test_tables_by_concurrency_and_policy(offline):
    run = offline()
    assert run.code == 0, run.err
    text = " ".join(run.out.split())
    assert "speed: tiny in int8, temperature 0" in text
    assert "concurrency policy tokens/s x off x best fixed tokens/s a user first token, ms" in text
    assert "concurrency policy accepted length drafted verified accepted step, ms draft schedule verify" in text
    assert text.count(" fixed:2 * ") == 4
    assert "2 requests in each of 2 rounds" in text
    for concurrency in (1, 3):
        assert f"concurrency {concurrency}: the same answers under every policy (at least " in text
    assert run.err.splitlines()[-2:] == ["concurrency 1", "concurrency 3"]


def test_json_and_files_hold_all_numbers(offline, tmp_path):
    steps = tmp_path / "steps.jsonl"
    run = offline("--json", "--out", tmp_path / "bench", "--steps", steps)
    assert run.code == 0, run.err
    report = json.loads(run.out)
    assert report == json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert report["settings"]["policies"] == ["off", "fixed:2"]
    assert report["settings"]["drafter"]["kind"] == "dspark"
    assert report["provenance"]["versions"]["torch"]
    assert [cell["concurrency"] for cell in report["cells"]] == [1, 3]
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    for cell in report["cells"]:
        assert (cell["best_fixed"], cell["baseline"]) == ("fixed:2", "off")
        for policy, numbers in cell["policies"].items():
            assert set(METRICS) <= set(numbers)
            assert numbers["differing_answers"] == 0
            assert numbers["compared_answers"] >= 4
            assert len(numbers["rounds"]) == 2
            for number, counts in enumerate(numbers["rounds"]):
                mine = [
                    StepRecord.from_dict(line)
                    for line in lines
                    if (line["concurrency"], line["policy"], line["round"]) == (cell["concurrency"], policy, number)
                ]
                assert len(mine) == counts["steps"]["steps"]
                assert sum(int(record.verify_lengths_R.sum()) for record in mine) == counts["steps"]["verified"]
    assert {line["round"] for line in lines} == {None, 0, 1}


def test_what_steps_cost_is_measured_where_a_policy_asks(offline, cache, monkeypatch, caplog):
    from dspark.engine import profile_measurement

    measure, measured = profile_measurement.measure_step_cost, []

    def quick(*models, **options):
        measured.append(options["max_concurrency"])
        return measure(*models, seconds=0.0, **options)

    monkeypatch.setattr(profile_measurement, "measure_step_cost", quick)
    run = offline("--policies", "delayed,immediate", "--json")
    assert run.code == 0, run.err
    report = json.loads(run.out)
    assert measured == [3]
    assert "measuring what steps cost on this machine" in caplog.text
    assert report["profile"]["measured_at"]
    for cell in report["cells"]:
        assert (cell["best_fixed"], cell["baseline"]) == (None, "delayed")
        assert cell["policies"]["immediate"]["differing_answers"] == 0
    text = offline("--policies", "delayed").out
    assert measured == [3]
    assert "x off" not in text
    assert "concurrency 1: one policy alone has no answers to be compared with" in text


def test_the_target_alone_needs_no_drafter(offline, tiny_target):
    run = offline("--policies", "off", "--json", models=("--target", tiny_target))
    assert run.code == 0, run.err
    report = json.loads(run.out)
    assert report["settings"]["drafter"] is None
    assert report["cells"][0]["policies"]["off"]["accepted_length"]["median"] == 1.0


def test_sampled_answers_are_not_compared(offline):
    run = offline("--temperature", 1)
    assert run.code == 0, run.err
    assert "concurrency 3: sampled answers are not compared" in run.out


def test_prompts_that_do_not_fit_are_left_out_and_said(offline, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("one and two", "one and two " * 50)))
    run = offline("--prompts", path, "--json")
    assert run.code == 0, run.err
    assert "left out 1 of 2 prompts" in run.err
    assert json.loads(run.out)["settings"]["prompts_left_out"] == 1
    run = offline("--prompts", path, "--max-tokens", 1000)
    assert run.code == 2
    assert "--max-tokens is 1000: with it none of 2 prompts fits into the target's context" in run.err


def test_what_was_finished_is_shown_after_an_interruption(offline, monkeypatch):
    from dspark.engine import bench

    measure = bench.measure_cell

    def interrupted(*arguments, concurrency, **options):
        if concurrency == 3:
            raise KeyboardInterrupt
        return measure(*arguments, concurrency=concurrency, **options)

    monkeypatch.setattr(bench, "measure_cell", interrupted)
    run = offline("--json")
    assert run.code == 130
    assert [cell["concurrency"] for cell in json.loads(run.out)["cells"]] == [1]
    assert "interrupted" in run.err
    run = offline("--concurrency", 3)
    assert run.code == 130
    assert "nothing was measured to its end" in run.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1,two"], "--concurrency 1,two must be numbers with commas between, such as 1,2,4,8"),
        (["--concurrency", "0,2"], "--concurrency 0,2: give numbers of at least 1, each once"),
        (["--concurrency", "2,2"], "--concurrency 2,2: give numbers of at least 1, each once"),
        (["--policies", "off,fast"], "--policies off,fast: policy 'fast' is unknown: off, fixed:K"),
        (["--policies", "off,off"], "--policies off,off: give each policy once"),
        (["--policies", "off,fixed:-1"], "--policies off,fixed:-1: policy 'fixed:-1': length"),
        (["--requests", 0], "--requests is 0; it must be at least 1"),
        (["--rounds", 0], "--rounds is 0; it must be at least 1"),
        (["--max-tokens", 0], "--max-tokens is 0; it must be at least 1"),
        (["--kv-memory", 0], "--kv-memory is 0; give GiB above 0"),
        (["--kv-memory", "inf"], "--kv-memory is inf; give GiB above 0"),
        (["--kv-memory", "0.0001"], "do not fit into kv_memory together"),
        (["--temperature", -1], "temperature"),
        (["--prompts", "nowhere"], "prompts 'nowhere' are neither builtin"),
    ],
)
def test_a_mistake_is_named(offline, options, message):
    run = offline(*options)
    assert run.code == 2
    assert run.err.splitlines()[-1].startswith("dspark: ")
    assert message in run.err


def test_policies_that_draft_need_a_drafter_that_can(dspark, offline, tiny_target, tiny_drafter):
    run = offline(models=("--target", tiny_target, "--drafter", "none"))
    assert run.code == 2
    assert "--policies off,fixed:2 need a drafter" in run.err
    run = offline(models=("--target", tiny_target))
    assert run.code == 2
    assert f"--target {tiny_target} needs a drafter that was trained for it" in run.err
    blind = tiny_drafter.parent / "dflash-anchor-first"
    run = offline("--policies", "off,delayed", models=("--target", tiny_target, "--drafter", blind))
    assert run.code == 2
    assert "--policies: delayed needs a drafter with a confidence head" in run.err
    run = dspark("bench", "offlin")
    assert run.code == 2
    assert 'Did you mean "offline"?' in run.err
    assert "(see `dspark bench --help`)" in run.err

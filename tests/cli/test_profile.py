"""``dspark profile`` on a tiny random target and its drafter."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def arguments(tiny_target, tiny_drafter, monkeypatch):
    """A command that makes as few rounds as it may."""
    from dspark.engine import profile_measurement

    measure = profile_measurement.measure_step_cost
    monkeypatch.setattr(
        profile_measurement,
        "measure_step_cost",
        lambda *models, **options: measure(*models, seconds=0.0, **options),
    )
    return ["profile", "--target", tiny_target, "--drafter", tiny_drafter, "--max-concurrency", 2]


def test_measures_once_and_keeps_what_it_found(dspark, arguments, cache, tmp_path):
    page = tmp_path / "profile.html"
    run = dspark(*arguments, "--plot", page)
    assert run.code == 0, run.err
    text = " ".join(run.out.split())
    assert "tiny in int8 on " in text
    assert "target step, by tokens in it" in text
    assert "a round, by requests decoding together" in text
    assert "Verifying 5 draft tokens of one request costs " in text
    assert "timing, round 3" in run.err
    (file,) = (cache / "profiles").iterdir()
    assert f"kept in {file}" in run.out
    html = page.read_text()
    assert html.count("<svg") == 4
    assert "2 requests" in html
    assert "http" not in html

    before = file.read_bytes()
    again = dspark(*arguments)
    assert "There is a profile for these models here" in again.out
    assert "timing" not in again.err
    fewer = dspark(*arguments[:-1], 1)
    assert "There is a profile for these models here" in fewer.out
    assert file.read_bytes() == before

    anew = dspark(*arguments, "--remeasure")
    assert "timing, round 3" in anew.err
    assert file.read_bytes() != before


def test_json_is_all_that_is_known(dspark, arguments, cache):
    run = dspark(*arguments, "--json")
    content = json.loads(run.out)
    assert "timing" not in run.err
    assert content["measured_now"] is True
    (file,) = (cache / "profiles").iterdir()
    assert content["file"] == str(file)
    stored = json.loads(file.read_text())
    assert {name: content[name] for name in stored} == stored
    assert content["key"]["max_concurrency"] == 2
    assert {point["requests"] for point in content["points"]["verify"]} == {1, 2}
    assert json.loads(dspark(*arguments, "--json").out) == content | {"measured_now": False}


def test_a_profile_of_another_version_is_measured_again_and_says_so(dspark, arguments, cache):
    content = json.loads(dspark(*arguments, "--json").out)
    (file,) = (cache / "profiles").iterdir()
    stored = json.loads(file.read_text())
    stored["key"]["torch"] = "1.0"
    file.write_text(json.dumps(stored))
    run = dspark(*arguments)
    assert run.code == 0
    assert f"note: {file} was measured with torch '1.0'" in run.err
    assert json.loads(file.read_text())["key"] == content["key"]

    more = dspark(*arguments[:-1], 3)
    assert "was measured with up to 2 requests at once" in more.err
    assert json.loads(file.read_text())["key"]["max_concurrency"] == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-concurrency", 0], "--max-concurrency must be at least 1"),
        (["--drafter", "none"], "--drafter none leaves nothing to schedule"),
    ],
)
def test_values_out_of_range_are_named(dspark, tiny_target, extra, message):
    run = dspark("profile", "--target", tiny_target, *extra)
    assert run.code == 2
    assert message in run.err

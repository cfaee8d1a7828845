"""Stored profiles: what is written is found again, and nothing else is ever used."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from dspark.drafters import load_drafter
from dspark.engine.profile import (
    ProfileKey,
    ProfilePoints,
    StoredProfile,
    profile_key,
    profile_path,
    read_profile,
    write_profile,
)
from dspark.models.loading import load_target
from dspark.scheduling import DraftPoint, PrefillPoint, StepCost, VerifyPoint
from tests.cli.tokenizer import character_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"
KEY = ProfileKey(
    hardware="Some CPU @ 2 GHz",
    cores=4,
    threads=2,
    target="Some/Target",
    fingerprint="ab12",
    implementation="native",
    dtype="int8",
    instructions="avx2",
    drafter="dspark, bfloat16, cd34",
    block_size=7,
    torch="2.13.0",
    dspark="0.1.0",
    max_concurrency=16,
)
POINTS = ProfilePoints(
    verify=(
        VerifyPoint(tokens=1, requests=1, context_tokens=32, seconds=0.02),
        VerifyPoint(tokens=8, requests=1, context_tokens=32, seconds=0.03),
        VerifyPoint(tokens=8, requests=1, context_tokens=512, seconds=0.04),
    ),
    draft=(DraftPoint(requests=1, block_length=7, seconds=0.005),),
    prefill=(PrefillPoint(tokens=64, seconds=0.1),),
)
PROFILE = StoredProfile(
    key=KEY,
    cost=StepCost.fitted(POINTS.verify, POINTS.draft, POINTS.prefill, schedule_seconds=0.001),
    points=POINTS,
    measured_at="2026-01-02T03:04:05+00:00",
    seconds_taken=61.5,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_written_is_found_again(cache):
    assert read_profile(KEY) is None
    path = write_profile(PROFILE)
    assert path == profile_path(KEY)
    assert path.parent == cache / "profiles"
    assert path.name.startswith("some-target-int8-")
    assert read_profile(KEY) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written is left


def test_it_serves_fewer_requests_at_once_but_not_more():
    path = write_profile(PROFILE)
    assert read_profile(replace(KEY, max_concurrency=8)) == PROFILE
    with pytest.raises(ValueError, match=r"up to 16 requests .* max_concurrency is 17.*--max-concurrency 17") as error:
        read_profile(replace(KEY, max_concurrency=17))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "name", ["hardware", "cores", "threads", "fingerprint", "implementation", "dtype", "instructions", "drafter"]
)
def test_other_hardware_and_models_have_their_own(name):
    other = replace(KEY, **{name: 1 if isinstance(getattr(KEY, name), int) else "other"})
    write_profile(PROFILE)
    assert read_profile(other) is None
    write_profile(replace(PROFILE, key=other))
    assert read_profile(KEY) == PROFILE


@pytest.mark.parametrize("name", [field.name for field in fields(ProfileKey) if field.compare])
def test_a_file_that_was_measured_on_something_else_is_refused(name, cache):
    changed = {"max_concurrency": 8}.get(name, 3 if isinstance(getattr(KEY, name), int) else "other")
    written = write_profile(replace(PROFILE, key=replace(KEY, **{name: changed})))
    with pytest.raises(ValueError, match=r"with `dspark profile") as error:
        read_profile(KEY, written)
    assert name in str(error.value)
    assert str(written) in str(error.value)


@pytest.mark.parametrize("name", ["torch", "dspark"])
def test_another_version_takes_the_place_of_the_one_before(name):
    path = write_profile(replace(PROFILE, key=replace(KEY, **{name: "1.0"})))
    with pytest.raises(ValueError, match=rf"measured with {name} '1.0', and here it is "):
        read_profile(KEY)
    assert write_profile(PROFILE) == path
    assert read_profile(KEY) == PROFILE


def test_the_name_of_the_target_is_for_people():
    write_profile(replace(PROFILE, key=replace(KEY, target="Some-Target")))
    assert read_profile(KEY) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(format=2),
        lambda content: content.pop("points"),
        lambda content: content["key"].pop("threads"),
        lambda content: content["key"].update(colour="red"),
        lambda content: content["cost"].pop("prefill"),
        lambda content: content["points"]["draft"].append({"requests": 1}),
        lambda content: content["cost"]["verify"].update(seconds=[0.3, 0.1]),
    ],
)
def test_damaged_files_are_named(damage):
    path = write_profile(PROFILE)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"is no profile that can be read .*measure again with `dspark profile`"):
        read_profile(KEY)
    path.write_text("{")
    with pytest.raises(ValueError, match=path.name):
        read_profile(KEY)


def test_a_file_that_is_asked_for_by_name_has_to_be_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_profile(KEY, tmp_path / "none.json")


def test_the_key_of_this_process(tmp_path):
    shutil.copytree(GOLDEN / "qwen3-tiny-target", tmp_path / "tiny")
    character_tokenizer().save_pretrained(tmp_path / "tiny")
    target = load_target(str(tmp_path / "tiny"), dtype="float32")
    drafter = load_drafter(GOLDEN / "dspark-vanilla", target.model)
    key = profile_key(target, drafter, max_concurrency=4)
    assert (key.target, key.fingerprint, key.dtype) == ("tiny", target.model.fingerprint, "float32")
    assert (key.threads, key.torch) == (torch.get_num_threads(), torch.__version__)
    assert key.drafter.startswith("dspark, float32, ")
    assert key.hardware

    with torch.no_grad():
        drafter.norm.weight.mul_(2.0)  # trained further: drafting costs what it did
    assert profile_key(target, drafter, max_concurrency=4) == key
    assert profile_key(target, drafter.to(torch.bfloat16), max_concurrency=4) != key
    other = load_drafter(GOLDEN / "dspark-gated", target.model)
    assert profile_key(target, other, max_concurrency=4) != key

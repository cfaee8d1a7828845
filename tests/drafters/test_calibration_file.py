"""``calibration.json``: written, read, attached, and refused where it does not belong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.calibration.calibration import Calibration
from dspark.drafters import TrainableDrafter, load_drafter, save_drafter
from dspark.drafters.calibration_file import (
    CALIBRATION_FILE,
    CalibrationFile,
    drafter_fingerprint,
    read_calibration,
    write_calibration,
)
from dspark.drafters.checkpoint import read_drafter_calibration

DrafterOf = Callable[..., TrainableDrafter]
TEMPERATURES = (1.5, 1.25, 1.0, 0.75)


@pytest.fixture
def directory(drafter_of: DrafterOf, tmp_path: Path) -> Path:
    """A drafter of block size 4 with confidence head."""
    save_drafter(drafter_of(), tmp_path, include_embeddings=True)
    return tmp_path


def file_of(**changes: Any) -> CalibrationFile:
    content: dict[str, Any] = {
        "calibration": Calibration(
            temperatures=TEMPERATURES, by_sampling_temperature={0.0: (1.0,) * 4, 0.7: (2.0,) * 4}
        ),
        "dataset": "held-out.jsonl (12 prompts)",
        "num_samples": 321,
        "ece_before": (0.05,) * 4,
        "ece_after": (0.01,) * 4,
        "target": {"name": "tiny", "fingerprint": "f00", "dtype": "int8"},
        "date": "2026-01-02",
        "details": {"options": {"seed": 3}},
    }
    return CalibrationFile(**content | changes)


def test_what_is_written_is_read(directory: Path) -> None:
    drafter = load_drafter(directory)
    assert drafter.calibration is None
    assert read_drafter_calibration(directory) is None
    file = file_of(drafter=drafter_fingerprint(drafter))
    write_calibration(directory / CALIBRATION_FILE, file)
    assert read_calibration(directory / CALIBRATION_FILE, block_size=4, fingerprint=file.drafter) == file
    assert read_drafter_calibration(directory) == file
    loaded = load_drafter(directory)
    assert loaded.calibration == file.calibration
    assert loaded.calibration.at(0.6) == (2.0,) * 4
    assert load_drafter(directory, calibrated=False).calibration is None
    assert sorted(path.name for path in directory.iterdir()) == [CALIBRATION_FILE, "config.json", "model.safetensors"]


def test_the_published_keys_are_at_the_top() -> None:
    content = file_of().to_dict()
    published = {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert content.keys() == published | {"dspark"}
    assert content["temperatures"] == list(TEMPERATURES)
    assert content["dspark"]["by_sampling_temperature"] == {"0": [1.0] * 4, "0.7": [2.0] * 4}


def test_a_fingerprint_is_the_weights_whatever_type_they_run_in(directory: Path) -> None:
    drafter = load_drafter(directory)
    fingerprint = drafter_fingerprint(drafter)
    assert drafter_fingerprint(load_drafter(directory, dtype=torch.bfloat16)) == fingerprint
    assert drafter_fingerprint(load_drafter(directory, dtype=torch.float64)) == fingerprint
    with torch.no_grad():
        drafter.fc.weight.mul_(1.5)
    assert drafter_fingerprint(drafter) != fingerprint


def test_files_of_other_trainers_are_read(directory: Path) -> None:
    content = {"temperatures": [1, 2, 3, 4], "drafter": "org/drafter", "target": ["a"], "trainer": {"x": 1}}
    (directory / CALIBRATION_FILE).write_text(json.dumps(content))
    calibration = load_drafter(directory).calibration
    assert calibration == Calibration(temperatures=(1.0, 2.0, 3.0, 4.0))
    file = read_drafter_calibration(directory)
    assert file is not None
    assert (file.drafter, file.dataset, file.num_samples) == (None, "", 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperatures": [1.0] * 3}, "temperatures has 3 numbers, but the drafter has block_size 4"),
        ({"temperatures": [1.0, 1.0, 1.0, 0.0]}, "temperatures must be finite and above 0"),
        ({"temperatures": [1.0, 1.0, 1.0, float("nan")]}, "temperatures must be finite and above 0"),
        ({"temperatures": [1.0, 1.0, 1.0, "1"]}, "temperatures must be a list of numbers"),
        ({}, "temperatures must be a list of numbers"),
        (["temperatures"], "must hold a JSON object"),
        ({"temperatures": [1.0] * 4, "dspark": 3}, "dspark must be an object"),
        (
            {"temperatures": [1.0] * 4, "dspark": {"by_sampling_temperature": {"0": [1.0]}}},
            r"dspark.by_sampling_temperature.0 has 1 numbers",
        ),
        (
            {"temperatures": [1.0] * 4, "dspark": {"by_sampling_temperature": {"hot": [1.0] * 4}}},
            "has the key 'hot'; it must be a sampling temperature",
        ),
        (
            {"temperatures": [1.0] * 4, "dspark": {"drafter": {"fingerprint": "other"}}},
            "belongs to another drafter, or to this one before it was trained further",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(directory: Path, content: object, message: str) -> None:
    (directory / CALIBRATION_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(directory)
    assert str(caught.value).startswith(str(directory / CALIBRATION_FILE))
    assert "fit it again with `dspark calibrate`, or delete the file" in str(caught.value)
    assert load_drafter(directory, calibrated=False).calibration is None


def test_half_a_file_is_refused(directory: Path) -> None:
    (directory / CALIBRATION_FILE).write_text('{"temperatures": [1.0, ')
    with pytest.raises(ValueError, match=r"calibration.json is not valid JSON .* fit it again"):
        load_drafter(directory)


@pytest.mark.parametrize("variant", ["none", "eagle3"])
def test_a_drafter_without_confidence_head_has_nothing_to_calibrate(
    variant: str, drafter_of: DrafterOf, tmp_path: Path
) -> None:
    save_drafter(
        drafter_of(variant, confidence=False) if variant == "none" else drafter_of(variant),
        tmp_path,
        include_embeddings=True,
    )
    write_calibration(tmp_path / CALIBRATION_FILE, file_of())
    with pytest.raises(ValueError, match="no confidence head, so there is nothing to calibrate; delete the file"):
        load_drafter(tmp_path)

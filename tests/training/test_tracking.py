from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dspark.training import tracking
from dspark.training.accepted_length import AcceptedLength
from dspark.training.held_out import HeldOutResult
from dspark.training.loop import StepResult, Trainer
from dspark.training.run import plan_run, prepare_run
from dspark.training.tracking import check_tracker, held_out_curves, open_tracker
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows

ROOT = Path(__file__).parents[2]


def test_held_out_curves_are_by_position() -> None:
    length = AcceptedLength(value=2.5, survival=(0.9, 0.6), acceptance=(0.9, 0.7), conditional_acceptance=(0.9, 0.66))
    result = HeldOutResult(sampled=length, greedy=length, loss=1.5, confidence_bce=None, blocks=3)
    curves = held_out_curves(result)
    assert curves["held_out/accepted_length"] == 2.5
    assert (curves["held_out/acceptance_1"], curves["held_out/acceptance_2"]) == (0.9, 0.7)
    assert (curves["held_out/survival_1"], curves["held_out/survival_2"]) == (0.9, 0.6)
    assert curves["held_out/conditional_acceptance_2"] == 0.66
    assert "held_out/confidence_bce" not in curves


def test_no_tracker_takes_everything(tmp_path: Path) -> None:
    tracker = open_tracker("none", tmp_path, {}, done_steps=0)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tensorboard", "trackio"])
def test_a_package_that_is_missing_is_named_before_the_run(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"tracking is {kind}.*pip install 'dspark\[{kind}\]'.*tracking=none"):
        check_tracker(kind)
    target = tiny_target()
    data = write_rows(tmp_path / "data", greedy_rows(target, rows=8))
    recipe = tiny_recipe(data, tmp_path / "run").model_copy(update={"tracking": kind})
    with pytest.raises(ValueError, match="pip install"):
        plan_run(recipe, target)


def curves_of(directory: Path) -> Mapping[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_has_the_log_also_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'dspark[tensorboard]'")
    target = tiny_target(sharpness=8.0)
    data = write_rows(tmp_path / "data", greedy_rows(target, rows=8, copies=3))
    recipe = tiny_recipe(data, tmp_path / "run").model_copy(update={"tracking": "tensorboard"})

    def die(result: StepResult) -> None:
        if result.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(prepare_run(plan_run(recipe, target), resume=True), resume=True).run(on_step=die)
    Trainer(prepare_run(plan_run(recipe, target), resume=True), resume=True).run()
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if entry["event"] == "step"]
    held_out = [entry for entry in entries if entry["event"] == "held_out"]
    curves = curves_of(tmp_path / "run" / "tensorboard")
    for name in ("loss", "cross_entropy", "gradient_norm", "learning_rate_factor", "tokens_per_second"):
        assert [step for step, _ in curves[f"train/{name}"]] == list(range(1, 13))
        assert [value for _, value in curves[f"train/{name}"]] == pytest.approx([s[name] for s in steps], rel=1e-5)
    assert curves["held_out/accepted_length"] == [
        (entry["step"], pytest.approx(entry["sampled"]["value"], rel=1e-5)) for entry in held_out
    ]
    assert [value for _, value in curves["held_out/acceptance_2"]] == pytest.approx(
        [entry["sampled"]["acceptance"][1] for entry in held_out], rel=1e-5
    )


TRACKIO = """
import sys
from pathlib import Path
from dspark.training.tracking import open_tracker
for first in (1, 4):
    tracker = open_tracker("trackio", Path(sys.argv[1]), {"seed": 0}, done_steps=first - 1)
    for step in range(first, first + 3):
        tracker.log(step, {"train/loss": 1.0 / step})
    tracker.close()
print("the only line on stdout")
from trackio.sqlite_storage import SQLiteStorage
assert [(entry["step"], entry["train/loss"]) for entry in SQLiteStorage.get_logs("dspark", "a-run")] == [
    (step, 1.0 / step) for step in range(1, 7)
]
"""


def test_trackio_logs_locally_without_a_network(tmp_path: Path) -> None:
    """In a process of its own: it reads its settings when imported, and warns of its own accord."""
    pytest.importorskip("trackio", reason="pip install 'dspark[trackio]'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    environment |= {"TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "a-run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the only line on stdout\n"
    assert (tmp_path / "store" / "dspark.db").exists()

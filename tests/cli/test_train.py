from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dspark.cli import main
from dspark.models.loading import LoadedTarget
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target = tiny_target(sharpness=8.0)

    def load_target(name: str, *, dtype: str, device: str) -> LoadedTarget:
        assert (name, dtype, device) == ("tiny", "float32", "cpu")
        return target

    monkeypatch.setattr("dspark.models.loading.load_target", load_target)
    data = write_rows(tmp_path / "data", greedy_rows(target, rows=8, copies=2))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_recipe(data, tmp_path / "run").model_dump(mode="json")))
    return path


Capture = pytest.CaptureFixture[str]


def test_training_prints_its_cost_its_progress_and_the_drafter(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", str(recipe), "batch.steps=6"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "run" / "drafter")
    error = " ".join(captured.err.split())
    assert "16 rows" in error
    assert "GiB to write" in error
    assert "6 steps of 72 block tokens" in error
    assert "held-out accepted length" in error


def test_json_is_one_object(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "elsewhere"
    assert main(["train", str(recipe), "batch.steps=6", "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err == ""
    assert result["plan"]["rows"] == 16
    assert result["plan"]["states_missing"]["bytes"] > 0
    assert result["result"]["end"] == "finished"
    assert result["result"]["drafter"] == str(out / "drafter")
    assert result["result"]["best"]["sampled"]["value"] >= 1.0


def test_several_data_directories(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    first = tmp_path / "data"
    second = tmp_path / "more"
    second.mkdir()
    (second / "rows-00000.jsonl").write_bytes((first / "rows-00000.jsonl").read_bytes())
    assert main(["train", str(recipe), "--data", str(first), "--data", str(second), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["rows"] == 32
    assert not (tmp_path / "run").exists()
    assert main(["train", str(recipe), "--data", str(first), "--data", str(first), "--dry-run"]) == 2
    assert "occurs twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arguments: [*arguments, "batch.stepz=3"], "did you mean batch.steps?"),
        (lambda arguments: [arguments[0], arguments[1] + "x"], "recipe.yamlx"),
        (lambda arguments: [*arguments, "--data", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_end_with_one_line(
    change: Callable[[list[str]], list[str]], message: str, recipe: Path, capsys: Capture
) -> None:
    assert main(change(["train", str(recipe)])) == 2
    assert message in capsys.readouterr().err


def test_help(capsys: Capture) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("--no-resume", "--data", "recipes/smollm2-135m.yaml", "--dry-run"):
        assert word in text

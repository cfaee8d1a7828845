"""What is found out, and what is left behind, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dspark.files import exclusive
from dspark.models.loading import LoadedTarget
from dspark.training import tracking
from dspark.training.data.rows import DataRow
from dspark.training.distributed import World
from dspark.training.loop import StepResult, Trainer
from dspark.training.recipe import Recipe
from dspark.training.run import Run, plan_run, prepare_run
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows

EAGLE3 = {"kind": "eagle3", "tap_layers": [0, 2], "block_size": 3, "draft_vocab_size": 40}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(sharpness=8.0)


@pytest.fixture(scope="module")
def rows(target: LoadedTarget) -> list[DataRow]:
    return greedy_rows(target, rows=8, copies=3)


@pytest.fixture
def data(rows: list[DataRow], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data", rows)


def train_and_kill(recipe: Recipe, target: LoadedTarget, step: int) -> None:
    def on_step(result: StepResult) -> None:
        if result.step == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(prepare_run(plan_run(recipe, target), resume=True), resume=True).run(on_step=on_step)


class SeenByAnother:
    """The processes of a run, seen from one that is not the main one, while a third one does the same."""

    rank, world_size = 0, 1

    def __init__(self, states: Path) -> None:
        self._states = states

    def on_main(self, work: Callable[[], object]) -> None:
        work()

    def broadcast_object(self, value: bool) -> bool:
        return value

    def together(self, work: Callable[[Callable[[], None]], None]) -> None:
        work(lambda: None)

    def main_first(self, first: Callable[[], Run], then: Callable[[], Run]) -> Run:
        first()
        with exclusive(self._states):
            return then()


def test_any_number_of_processes_take_over_what_the_main_one_computed(
    target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data, tmp_path / "run")
    world = cast(World, SeenByAnother(recipe.states_directory))
    run = prepare_run(plan_run(recipe, target), resume=False, world=world)
    assert len(run.source.read(run.training_rows)) == len(run.training_rows) > 0
    assert run.continues


@pytest.mark.parametrize("source", ["online", "offline"])
def test_a_run_does_not_go_on_with_another_target(
    source: str, target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data, tmp_path / "run", states={"source": source})
    train_and_kill(recipe, target, 5)
    other = tiny_target(sharpness=8.0, seed=1)
    elsewhere = tiny_recipe(data, tmp_path / "run", states={"source": source, "directory": tmp_path / "others"})
    plan = plan_run(elsewhere, other)
    with pytest.raises(ValueError, match=r"target tiny is not the model that the run in .*run was started for.*--out"):
        prepare_run(plan, resume=True)
    assert not (tmp_path / "others").exists()
    assert Trainer(prepare_run(plan_run(recipe, target), resume=True), resume=True).step == 4


def test_a_new_start_that_is_killed_early_leaves_no_checkpoint_of_the_run_before(
    target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    train_and_kill(tiny_recipe(data, tmp_path / "run"), target, 5)
    other = tiny_recipe(data, tmp_path / "run", optimiser={"learning_rate": 0.5})
    prepare_run(plan_run(other, target), resume=False)  # and no further
    assert Trainer(prepare_run(plan_run(other, target), resume=True), resume=True).step == 0


def test_what_a_killed_publication_left_goes_with_the_next(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / ".drafter.0123abcd.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"0" * 100)
    Trainer(prepare_run(plan_run(tiny_recipe(data, tmp_path / "run"), target), resume=True), resume=True).run()
    assert not left.exists()
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()


def test_what_would_end_the_run_later_is_found_first(
    target: LoadedTarget, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {"initialise_from": tmp_path / "nowhere"}
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"held_out": {"fraction": 1e-9}}, {}, "held_out.fraction 1e-09 leaves 24 rows to train on and 0 held out"),
        ({"drafter": nowhere}, {}, "nowhere"),
        ({"batch": {"compile": True}}, {}, r"batch.compile needs a C\+\+ compiler"),
        ({"states": {"max_length": 5}}, {}, "no row of .* two tokens of an answer within states.max_length 5: raise"),
        ({}, {"tracking": "tensorboard"}, "tracking is tensorboard, whose package is not installed"),
    ]
    for sections, values, message in cases:
        recipe = tiny_recipe(data, tmp_path / "run", **sections).model_copy(update=values)
        with pytest.raises((ValueError, OSError), match=message):
            plan_run(recipe, target)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("drafter", [EAGLE3, {"kind": "mtp"}], ids=["eagle3", "mtp"])
def test_drafters_over_pairs_refuse_rows_that_begin_with_an_answer(
    drafter: dict[str, Any], target: LoadedTarget, rows: list[DataRow], tmp_path: Path
) -> None:
    first = rows[0].response_spans[0][0]
    spans = tuple((start - first, end - first) for start, end in rows[0].response_spans)
    bare = replace(rows[0], id="toy/bare", token_ids=rows[0].token_ids[first:], response_spans=spans)
    data = write_rows(tmp_path / "data", [*rows, bare])
    recipe = tiny_recipe(data, tmp_path / "run")
    other = Recipe.model_validate({**recipe.model_dump(mode="json"), "drafter": drafter})
    with pytest.raises(ValueError, match=r"row data/toy/bare begins with an answer .* drafter.kind=(eagle3|mtp) needs"):
        plan_run(other, target)
    plan_run(recipe, target)  # a block needs no context

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.models.loading import LoadedTarget
from dspark.training.data.rows import DataRow
from dspark.training.loop import DivergenceError, StepResult, Trainer, TrainingResult
from dspark.training.recipe import Recipe
from dspark.training.run import plan_run, prepare_run
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows
from tests.training.worker import small_files


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(sharpness=8.0)


@pytest.fixture(scope="module")
def rows(target: LoadedTarget) -> list[DataRow]:
    return greedy_rows(target, rows=8, copies=3)


@pytest.fixture
def data(rows: list[DataRow], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data", rows)


def open_trainer(recipe: Recipe, target: LoadedTarget, *, resume: bool = True) -> Trainer:
    return Trainer(prepare_run(plan_run(recipe, target), resume=resume), resume=resume)


def log(out: Path, event: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in entry.items() if k not in ("seconds", "tokens_per_second")}
        for entry in entries
        if entry["event"] == event
    ]


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs but finally blocks."""


def run_and_kill(trainer: Trainer, step: int) -> None:
    def on_step(result: StepResult) -> None:
        if result.step == step:
            raise Killed

    with pytest.raises(Killed):
        trainer.run(on_step=on_step)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_a_killed_run_goes_on_with_the_same_loss_curve(
    head: str, target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    drafter = {"markov_head": head}
    whole = tiny_recipe(data, tmp_path / "whole", drafter=drafter)
    killed = tiny_recipe(data, tmp_path / "killed", drafter=drafter, states={"directory": tmp_path / "whole/states"})
    result = open_trainer(whole, target).run()
    run_and_kill(open_trainer(killed, target), 3)  # before the first checkpoint
    run_and_kill(open_trainer(killed, target), 7)
    resumed = open_trainer(killed, target)
    assert resumed.step == 6  # the best held-out evaluation was saved there
    again = resumed.run()
    for event in ("step", "held_out"):
        assert log(tmp_path / "killed", event) == log(tmp_path / "whole", event)
    assert [entry["step"] for entry in log(tmp_path / "killed", "step")] == list(range(1, 13))
    assert again.best == result.best
    assert result.drafter is not None
    assert again.drafter is not None
    one, two = (load_drafter(path, target.model).state_dict() for path in (result.drafter, again.drafter))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_answers_are_learnt_by_heart(tmp_path: Path) -> None:
    target = tiny_target(sharpness=40.0)
    data = write_rows(tmp_path / "data", greedy_rows(target, rows=6, copies=3))
    recipe = tiny_recipe(
        data,
        tmp_path / "run",
        drafter={"num_layers": 2, "draft_vocab_size": 61},
        batch={"steps": 150, "blocks_per_step": 64, "warmup_steps": 5},
        optimiser={"learning_rate": 0.02, "muon_learning_rate": 0.05},
        held_out={"every_steps": 75},
        checkpoint={"every_steps": 75},
    )
    result = open_trainer(recipe, target).run()
    assert result.best is not None
    # Held-out rows are copies of training rows: a drafter that knows them has all 3 tokens of a block accepted.
    assert result.best["sampled"]["value"] > 3.6
    assert result.best["greedy"]["value"] > 3.7
    assert result.end == "finished"


def test_a_checkpoint_is_form_a_with_its_origin(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, tmp_path / "run")
    result = open_trainer(recipe, target).run()
    assert result.drafter == tmp_path / "run" / "drafter"
    drafter = load_drafter(result.drafter, target.model)
    assert drafter.config.draft_vocab_size == 40
    assert drafter.config.mask_token_id == 60
    assert drafter.draft_token_ids_D is not None
    assert 1 in drafter.draft_token_ids_D.tolist()  # the end token, though no answer has it
    assert sorted(path.name for path in result.drafter.iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    origin = json.loads((result.drafter / "provenance.json").read_text())
    assert origin["recipe"]["batch"]["steps"] == 12
    assert origin["versions"]["torch"] == torch.__version__
    assert origin["data"]["training_rows"] + origin["data"]["held_out_rows"] == 24
    assert {"command", "commit", "machine", "target", "held_out", "step", "draft_vocabulary_coverage"} <= origin.keys()
    (result.drafter / "calibration.json").write_text("{}")
    assert open_trainer(recipe, target).run().drafter == result.drafter
    assert (result.drafter / "calibration.json").exists()  # the same weights, so what was fitted for them stays
    (result.drafter / "model.safetensors").write_bytes(b"of another run")
    open_trainer(recipe, target).run()
    assert not (result.drafter / "calibration.json").exists()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert f"step-{result.best_step:06d}" in kept
    assert "step-000012" in kept
    assert len(kept) <= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(
    number: signal.Signals, target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data, tmp_path / "run")

    def on_step(result: StepResult) -> None:
        if result.step == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = open_trainer(recipe, target).run(on_step=on_step)
    assert (result.end, result.steps, result.drafter) == ("interrupted", 5, None)
    assert signal.getsignal(number) == before
    assert open_trainer(recipe, target).step == 5


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data, tmp_path / "run")
    trainer = open_trainer(recipe, target)

    def on_step(result: StepResult) -> None:
        if result.step == 5:
            with torch.no_grad():
                trainer.drafter.fc.weight[0, 0] = float("nan")

    with pytest.raises(DivergenceError, match=r"step 6: the loss is nan; the last good checkpoint is .*step-000004"):
        trainer.run(on_step=on_step)
    assert open_trainer(recipe, target).step == 4


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_goes_on(
    target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    whole, full = (tiny_recipe(data, tmp_path / name) for name in ("whole", "full"))
    with ExitStack() as stack:

        def on_step(result: StepResult) -> None:
            if result.step == 7:
                stack.enter_context(small_files())

        with pytest.raises(OSError, match=r"checkpoint of step 8 could not be written \(File too large\)") as error:
            open_trainer(full, target).run(on_step=on_step)
    assert "step-000006. Make room or set checkpoint.keep lower, then run the same command" in str(error.value)
    assert sorted(path.name for path in (tmp_path / "full/checkpoints").iterdir()) == ["step-000004", "step-000006"]
    open_trainer(full, target).run()
    open_trainer(whole, target).run()
    for event in ("step", "held_out"):
        assert log(tmp_path / "full", event) == log(tmp_path / "whole", event)


def test_a_damaged_checkpoint_says_how_to_go_on(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(data, tmp_path / "run")
    run_and_kill(open_trainer(recipe, target), 7)
    state = tmp_path / "run/checkpoints/step-000006/training_state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-000006/training_state.pt cannot be read .*go on from the"):
        open_trainer(recipe, target)


def test_accumulated_steps_are_the_same_steps(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    states = {"directory": tmp_path / "states"}
    for name, accumulate in (("one", 1), ("four", 4)):
        batch = {"accumulate": accumulate}
        open_trainer(tiny_recipe(data, tmp_path / name, batch=batch, states=states), target).run()
    for event in ("step", "held_out"):
        for one, four in zip(log(tmp_path / "one", event), log(tmp_path / "four", event), strict=True):
            assert four["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_early_stop(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        data,
        tmp_path / "run",
        optimiser={"learning_rate": 1e-12, "muon_learning_rate": 1e-12},
        held_out={"every_steps": 2, "patience": 2},
    )
    result = open_trainer(recipe, target).run()
    assert result.end == "early_stop"
    assert result.best_step is not None
    assert result.steps == result.best_step + 4 < 12  # two evaluations without a better one
    assert result.drafter is not None


def test_a_grown_data_set_does_not_change_a_run_that_goes_on(
    target: LoadedTarget, rows: list[DataRow], data: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data, tmp_path / "run")
    run_and_kill(open_trainer(recipe, target), 5)
    write_rows(data, [*rows, *(replace(row, id=f"new/{row.id}") for row in rows[:3])])
    run = prepare_run(plan_run(recipe, target), resume=True)
    assert run.new_rows == 3
    assert len(run.training_rows) + len(run.held_out_rows) == 24
    assert Trainer(run, resume=True).step == 4
    fresh = prepare_run(plan_run(recipe, target), resume=False)
    assert len(fresh.training_rows) + len(fresh.held_out_rows) == 27
    assert Trainer(fresh, resume=False).step == 0
    write_rows(data, rows[1:])
    with pytest.raises(ValueError, match=r"rows of the run in .* are not in .* any more"):
        prepare_run(plan_run(recipe, target), resume=True)


def test_another_recipe_in_the_same_directory_is_refused(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    run_and_kill(open_trainer(tiny_recipe(data, tmp_path / "run"), target), 5)
    recipe = tiny_recipe(data, tmp_path / "run", batch={"steps": 20}).model_copy(update={"seed": 3})
    plan = plan_run(recipe, target)
    with pytest.raises(ValueError, match=r"another recipe \(batch.steps was 12 and is 20; seed.*initialise_from") as e:
        prepare_run(plan, resume=True)
    assert "--no-resume" in str(e.value)
    prepare_run(plan_run(tiny_recipe(data, tmp_path / "run", checkpoint={"keep": 1}), target), resume=True)
    # A run begun before heads looked back goes on; one that chose how they start does not change its mind.
    other_start = plan_run(tiny_recipe(data, tmp_path / "run", drafter={"initial_look_back": 1.0}), target)
    with pytest.raises(ValueError, match=r"initial_look_back was 3\.0 and is 1\.0"):
        prepare_run(other_start, resume=True)
    record = json.loads((tmp_path / "run/run.json").read_text())
    del record["recipe"]["drafter"]["initial_look_back"]
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    prepare_run(other_start, resume=True)


def test_going_on_from_a_given_drafter(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    first = open_trainer(tiny_recipe(data, tmp_path / "one"), target).run()
    assert first.drafter is not None
    states = {"directory": tmp_path / "one/states"}
    recipe = tiny_recipe(data, tmp_path / "two", drafter={"initialise_from": first.drafter}, states=states)
    trainer = open_trainer(recipe, target)
    assert trainer.step == 0
    given = load_drafter(first.drafter, target.model)
    assert torch.equal(trainer.drafter.fc.weight, given.fc.weight)
    other = {"initialise_from": first.drafter, "num_layers": 2}
    with pytest.raises(ValueError, match=r"differs from the recipe in num_hidden_layers 1 \(recipe: 2\)"):
        open_trainer(tiny_recipe(data, tmp_path / "three", drafter=other, states=states), target)


def test_autocast_and_backbone_confidence_train_too(
    target: LoadedTarget, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.recipe.multiplies_bfloat16", lambda device: True)
    recipe = tiny_recipe(
        data,
        tmp_path / "run",
        batch={"autocast": True, "steps": 30},
        loss={"confidence_reaches_backbone": True},
        drafter={"sample_from_anchor": False},
    )
    result: TrainingResult = open_trainer(recipe, target).run()
    steps = log(tmp_path / "run", "step")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert result.end == "finished"


def test_states_that_are_slow_to_compute_are_named(
    target: LoadedTarget, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(data, tmp_path / "run", states={"dtype": "bfloat16"})
    for fast in (False, True):
        monkeypatch.setattr("dspark.training.run.multiplies_bfloat16", lambda device, fast=fast: fast)
        notices = [notice for notice in plan_run(recipe, target).notices if notice.startswith("states.dtype")]
        assert len(notices) == (not fast)


def test_products_are_in_float32_where_bfloat16_is_slow(
    target: LoadedTarget, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {}
    for fast, autocast in ((False, False), (False, True), (True, True)):
        for module in ("recipe", "run"):
            monkeypatch.setattr(f"dspark.training.{module}.multiplies_bfloat16", lambda device, fast=fast: fast)
        recipe = tiny_recipe(data, tmp_path / f"{fast}-{autocast}", batch={"autocast": autocast})
        notices = [notice for notice in plan_run(recipe, target).notices if notice.startswith("batch.autocast")]
        assert len(notices) == (autocast and not fast)
        open_trainer(recipe, target).run()
        losses[fast, autocast] = [step["loss"] for step in log(tmp_path / f"{fast}-{autocast}", "step")]
    assert losses[False, True] == losses[False, False] != losses[True, True]


def test_confidence_loss_stays_in_its_head_unless_asked(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    gradients = {}
    for reaches in (False, True):
        loss = {"cross_entropy": 0.0, "total_variation": 0.0, "confidence_reaches_backbone": reaches}
        recipe = tiny_recipe(data, tmp_path / str(reaches), loss=loss)
        trainer = open_trainer(recipe, target)
        before = trainer.drafter.layers[0].mlp.up_proj.weight.clone()  # type: ignore[union-attr, operator]
        with pytest.raises(Killed):
            run_one(trainer)
        gradients[reaches] = not torch.equal(before, trainer.drafter.layers[0].mlp.up_proj.weight)  # type: ignore[union-attr, arg-type]
    assert gradients == {False: False, True: True}


def run_one(trainer: Trainer) -> None:
    def on_step(result: StepResult) -> None:
        raise Killed

    trainer.run(on_step=on_step)


def test_unusable_settings_are_refused_before_anything_is_computed(
    target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    for section, message in (
        ({"tap_layers": [3]}, r"^drafter\.tap_layers contains 3, the target's final layer.*use layers 0 to 2"),
        ({"tap_layers": [4]}, r"^drafter\.tap_layers contains 4, but the target has layers 0 to 3"),
        ({"mask_token": "<no such token>"}, r"^drafter\.mask_token '<no such token>' is not one token"),
        ({"mask_token": 61}, r"^drafter\.mask_token 61 is outside the vocabulary of 61 tokens"),
        ({"draft_vocab_size": 1000}, r"^drafter\.draft_vocab_size \(1000\) must not exceed vocab_size"),
        ({"num_heads": 3}, r"^drafter\.num_heads \(3\) must be a multiple of drafter\.num_kv_heads \(2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_run(tiny_recipe(data, tmp_path / "run", drafter=section), target)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        plan_run(tiny_recipe(tmp_path / "nowhere", tmp_path / "run"), target)


def test_a_mask_token_that_the_data_holds_is_named(target: LoadedTarget, tmp_path: Path) -> None:
    rows = [
        replace(row, token_ids=(60, *row.token_ids[1:]) if index < 2 else row.token_ids)
        for index, row in enumerate(greedy_rows(target, rows=3))
    ]
    data = write_rows(tmp_path / "data", rows)
    held = sum(60 in row.token_ids for row in rows)
    (_, notice) = plan_run(tiny_recipe(data, tmp_path / "run"), target).notices
    assert notice.startswith(f"{held} rows hold drafter.mask_token (id 60)")
    unheld = next(token for token in range(60) if not any(token in row.token_ids for row in rows))
    plan = plan_run(tiny_recipe(data, tmp_path / "run", drafter={"mask_token": unheld}), target)
    assert len(plan.notices) == 1  # of the manifest that is not there


def test_a_run_that_stopped_early_stays_where_it_is(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        data,
        tmp_path / "run",
        optimiser={"learning_rate": 1e-12, "muon_learning_rate": 1e-12},
        held_out={"every_steps": 2, "patience": 2},
    )
    first, again = open_trainer(recipe, target).run(), open_trainer(recipe, target).run()
    assert (first.end, again.end) == ("early_stop", "early_stop")
    assert again.steps == first.steps


def test_a_run_does_not_go_on_with_a_teacher_of_another_type(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    run_and_kill(open_trainer(tiny_recipe(data, tmp_path / "run"), target), 5)
    states = {"directory": tmp_path / "others", "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"another recipe \(states.dtype was 'float32' and is 'bfloat16'\)"):
        open_trainer(tiny_recipe(data, tmp_path / "run", states=states), target)
    elsewhere = {"directory": tmp_path / "others", "shard_mib": 1, "tokens_per_batch": 300}
    assert open_trainer(tiny_recipe(data, tmp_path / "run", states=elsewhere), target).step == 4


def test_a_given_drafter_of_another_target_learns_from_this_one(
    target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    other = tiny_target(sharpness=8.0, seed=1)
    given = open_trainer(tiny_recipe(write_rows(tmp_path / "o", greedy_rows(other, rows=8)), tmp_path / "a"), other)
    first = given.run()
    assert first.drafter is not None
    trainer = open_trainer(tiny_recipe(data, tmp_path / "b", drafter={"initialise_from": first.drafter}), target)
    ids_D = trainer.drafter.draft_token_ids_D
    assert ids_D is not None
    assert len(ids_D) == 40
    assert torch.equal(trainer.drafter.lm_head.weight, target.model.lm_head_weight_VH[ids_D])
    assert torch.equal(trainer.drafter.embed_tokens.weight, target.model.embedding_weight_VH)
    assert not torch.equal(target.model.lm_head_weight_VH, other.model.lm_head_weight_VH)


def test_gaps_in_the_heap_are_given_back_now_and_then(
    target: LoadedTarget, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr("dspark.training.loop._TRIM_EVERY_STEPS", 5)
    monkeypatch.setattr("dspark.training.loop.trim_heap", lambda: trimmed.append(None))
    assert open_trainer(tiny_recipe(data, tmp_path / "run"), target).run().steps == 12
    assert len(trimmed) == 2

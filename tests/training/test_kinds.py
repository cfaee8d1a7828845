"""Every kind of drafter through the whole loop: trained from its recipe, stored, loaded, decoding what it learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.decoding import SamplingSettings
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.registry import drafter_kind
from dspark.engine.generation import generate
from dspark.engine.result import GenerationResult
from dspark.models.loading import LoadedTarget
from dspark.training.data.rows import DataRow
from dspark.training.loop import Trainer
from dspark.training.run import plan_run, prepare_run
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows

GAMMA = 3
PARALLEL: dict[str, Any] = {"mask_token": "<mask>", "tap_layers": [0, 2], "num_layers": 1, "block_size": GAMMA}
KINDS: dict[str, dict[str, Any]] = {
    "dspark-vanilla": {"kind": "dspark", **PARALLEL, "markov_rank": 8, "draft_vocab_size": 40},
    "dspark-gated": {"kind": "dspark", **PARALLEL, "markov_head": "gated", "markov_rank": 8},
    "dspark-rnn": {"kind": "dspark", **PARALLEL, "markov_head": "rnn", "markov_rank": 8, "confidence_head": False},
    "dflash": {"kind": "dflash", **PARALLEL, "draft_vocab_size": 40},
    "dflash-original": {"kind": "dflash", **PARALLEL, "sample_from_anchor": False},
    "eagle3": {"kind": "eagle3", "tap_layers": [0, 2], "block_size": GAMMA, "draft_vocab_size": 40},
    "mtp": {"kind": "mtp", "draft_vocab_size": 40},
}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(sharpness=8.0)


@pytest.fixture(scope="module")
def rows(target: LoadedTarget) -> list[DataRow]:
    return greedy_rows(target, rows=4, copies=4)


def decode(
    target: LoadedTarget, directory: Path, row: DataRow, settings: SamplingSettings, max_tokens: int
) -> GenerationResult:
    start = row.response_spans[0][0]
    drafter = load_drafter(directory, target.model)
    *_, last = generate(
        target.model,
        drafter,
        row.token_ids[:start],
        settings,
        max_tokens=max_tokens,
    )
    assert last.result is not None
    return last.result


@pytest.mark.parametrize("name", KINDS)
def test_a_memorised_target_is_drafted_to_the_last_token(
    name: str, target: LoadedTarget, rows: list[DataRow], tmp_path: Path
) -> None:
    """What training is taught and what decoding computes are one function: every draft token is accepted."""
    recipe = tiny_recipe(
        write_rows(tmp_path / "data", rows),
        tmp_path / "run",
        batch={"steps": 180, "blocks_per_step": 48, "anchor_every_tokens": 2, "warmup_steps": 5},
        loss={"cross_entropy": 1.0},
        optimiser={"learning_rate": 0.01},
        held_out={"every_steps": 60, "fraction": 0.3},
        checkpoint={"every_steps": 60},
    ).model_copy(update={"drafter": tiny_recipe_drafter(KINDS[name])})
    result = Trainer(prepare_run(plan_run(recipe, target), resume=False), resume=False).run()
    assert result.drafter is not None
    drafter = load_drafter(result.drafter, target.model)
    assert drafter_kind(drafter.config) == KINDS[name]["kind"]
    whole = drafter.block_size + 1
    assert drafter.block_size == (1 if name == "mtp" else GAMMA)
    rounds = tokens = 0
    for row in rows[:4]:
        (start, end), *_ = row.response_spans
        # One token of the prefill, then whole rounds.
        length = 1 + whole * ((end - start - 1) // whole)
        decoded = decode(target, result.drafter, row, SamplingSettings(), length)
        assert decoded.token_ids == row.token_ids[start : start + length]
        rounds, tokens = rounds + decoded.rounds, tokens + length - 1
    assert tokens / rounds == pytest.approx(whole, abs=0.06 * whole)


def tiny_recipe_drafter(settings: dict[str, Any]) -> Any:
    """The drafter section of a recipe, validated."""
    from dspark.training.recipe import Recipe

    values = {"data": "d", "out": "o", "drafter": settings, "batch": {"steps": 100}}
    return Recipe.model_validate(values).drafter


def test_states_computed_online_give_the_losses_of_stored_ones(
    target: LoadedTarget, rows: list[DataRow], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data", rows)
    losses = {}
    for source in ("offline", "online"):
        recipe = tiny_recipe(data, tmp_path / source, states={"source": source}, batch={"steps": 6})
        steps: list[float] = []
        trainer = Trainer(prepare_run(plan_run(recipe, target), resume=False), resume=False)
        result = trainer.run(on_step=lambda step, steps=steps: steps.append(step.loss))  # type: ignore[misc]
        assert result.last is not None
        losses[source] = [*steps, result.last["loss"], result.last["sampled"]["value"]]
        assert (tmp_path / source / "states").exists() is (source == "offline")
    assert losses["online"] == pytest.approx(losses["offline"], rel=1e-4)


def test_one_store_serves_every_kind(target: LoadedTarget, rows: list[DataRow], tmp_path: Path) -> None:
    data, states = write_rows(tmp_path / "data", rows), tmp_path / "states"
    section = {"directory": states, "tap_layers": [0, 1, 2, 3]}
    for name in ("dspark-vanilla", "eagle3", "mtp"):
        values = tiny_recipe(data, tmp_path / name, states=section, batch={"steps": 3, "warmup_steps": 1})
        recipe = values.model_copy(update={"drafter": tiny_recipe_drafter(KINDS[name])})
        plan = plan_run(recipe, target)
        assert (plan.estimate.tokens > 0) is (name == "dspark-vanilla")
        Trainer(prepare_run(plan, resume=False), resume=False).run()
    lacking = tiny_recipe(data, tmp_path / "l", states={"tap_layers": [0, 1]})
    with pytest.raises(ValueError, match=r"states.tap_layers \[0, 1\] lacks layers \[2\], which the drafter sees"):
        plan_run(lacking, target)


def test_a_drafter_of_another_kind_is_no_start(target: LoadedTarget, rows: list[DataRow], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", rows)
    first = tiny_recipe(data, tmp_path / "first", batch={"steps": 6}).model_copy(
        update={"drafter": tiny_recipe_drafter(KINDS["mtp"])}
    )
    trained = Trainer(prepare_run(plan_run(first, target), resume=False), resume=False).run()
    second = tiny_recipe(data, tmp_path / "second", drafter={"initialise_from": trained.drafter})
    with pytest.raises(ValueError, match=r"is of kind mtp, drafter.kind is dspark"):
        plan_run(second, target)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.training.cost import measure_cost
from dspark.training.data.rows import DataRow
from dspark.training.recipe import Recipe
from dspark.training.run import plan_run
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def rows(target: LoadedTarget) -> list[DataRow]:
    return greedy_rows(target, rows=8)


def after_a_long_prompt(row: DataRow) -> DataRow:
    spans = tuple((start + 99, end + 99) for start, end in row.response_spans)
    return replace(row, id=f"long/{row.id}", token_ids=(5,) * 99 + row.token_ids, response_spans=spans)


@pytest.mark.parametrize("source", ["offline", "online"])
def test_rows_that_are_cut_before_their_answer_are_not_measured(
    source: str, target: LoadedTarget, rows: list[DataRow], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data", [*map(after_a_long_prompt, rows), *rows])
    plan = plan_run(tiny_recipe(data, tmp_path / "run", states={"source": source}), target)
    assert len(plan.rows) == 16
    assert [row.id.removeprefix("data/") for row in plan.usable_rows] == [row.id for row in rows]
    assert plan.tokens == 8 * 100 + sum(len(row.token_ids) for row in rows)
    assert plan.response_tokens == sum(row.response_tokens for row in rows)
    cost = measure_cost(plan)
    assert cost.step_seconds > 0.0
    assert (cost.states_seconds > 0.0) == (source == "offline")
    assert not (tmp_path / "run").exists()


def test_measuring_changes_nothing_of_what_follows(target: LoadedTarget, rows: list[DataRow], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", rows)
    plan = plan_run(tiny_recipe(data, tmp_path / "run"), target)
    before = torch.get_rng_state()
    weights = target.model.lm_head_weight_VH.clone(), target.model.embedding_weight_VH.clone()
    measure_cost(plan)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(target.model.lm_head_weight_VH, weights[0])
    assert torch.equal(target.model.embedding_weight_VH, weights[1])


def test_states_computed_online_cost_what_the_anchors_ask_for(
    target: LoadedTarget, rows: list[DataRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block stands for ``anchor_every_tokens`` tokens of an answer, however few it drafts."""
    data = write_rows(tmp_path / "data", rows)
    clock = iter(range(10_000))
    monkeypatch.setattr("dspark.training.cost.time.perf_counter", lambda: float(next(clock)))  # all takes one second
    recipe = tiny_recipe(data, tmp_path / "run").model_dump(mode="json")
    recipe |= {"drafter": {"kind": "mtp"}, "states": {"source": "online", "dtype": "float32", "max_length": 100}}
    plan = plan_run(Recipe.model_validate(recipe), target)
    online = measure_cost(plan)
    offline = measure_cost(replace(plan, recipe=Recipe.model_validate({**recipe, "states": {"dtype": "float32"}})))
    # 24 blocks, one every 3 response tokens; 36 of a row's 44 tokens are its answers. Two rows take a second.
    assert online.step_seconds - offline.step_seconds == pytest.approx(24 * 3 * (44 / 36) / (2 * 44))
    assert (online.states_seconds, offline.states_seconds) == (0.0, 0.0)

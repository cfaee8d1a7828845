"""The loss of a packed step is that of its blocks one by one, whatever the rows look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.training.anchors import anchor_positions
from dspark.training.batches import StepBlocks
from dspark.training.data.rows import DataRow
from dspark.training.distributed import World
from dspark.training.forward import TargetHead
from dspark.training.objective import slot_weights
from dspark.training.recipe import Recipe
from dspark.training.run import Run, plan_run, prepare_run
from dspark.training.start import start_drafter
from dspark.training.step import ParallelStep, StepSums, TrainingStep
from dspark.training.tap_scale import tap_scale
from tests.training.tiny import tiny_recipe, tiny_target, write_rows

SPANS: dict[str, tuple[tuple[int, int], ...]] = {
    "to the last token": ((3, 9), (11, 20)),
    "one token alone": ((2, 3), (4, 8), (8, 12)),
    "cut inside": ((5, 12), (30, 60)),
    "cut away": ((4, 10), (50, 60)),
    "two tokens": ((1, 3),),
    "long": ((2, 39),),
}
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "dspark": None,
    "eagle3": {"kind": "eagle3", "tap_layers": [0, 2], "block_size": 3, "draft_vocab_size": 40},
    "mtp": {"kind": "mtp"},
}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(sharpness=4.0)


@pytest.fixture(params=DRAFTERS)
def run(request: pytest.FixtureRequest, target: LoadedTarget, tmp_path: Path) -> Run:
    generator = torch.Generator().manual_seed(0)
    rows = [
        DataRow(
            id=f"{name}/{number}",
            source="odd",
            token_ids=tuple(torch.randint(2, 60, (spans[-1][1],), generator=generator).tolist()),
            response_spans=spans,
            finish_reasons=("stop",) * len(spans),
            temperature=1.0,
        )
        for name, spans in SPANS.items()
        for number in range(2)
    ]
    recipe = tiny_recipe(write_rows(tmp_path / "data", rows), tmp_path / "run", states={"max_length": 40})
    if (drafter := DRAFTERS[request.param]) is not None:
        recipe = Recipe.model_validate({**recipe.model_dump(mode="json"), "drafter": drafter})
    return prepare_run(plan_run(recipe, target), resume=False)


def gradients(step: ParallelStep, module: TrainingStep, parts: list[StepBlocks], run: Run) -> tuple[float, Any]:
    """Loss and gradients of parts that make one step together; each part is weighted by its own slots."""
    module.zero_grad()
    weights_G = slot_weights(module.drafter.block_size, module.settings.decay)

    def weight(part: StepBlocks) -> float:
        counts_G = torch.from_numpy(part.supervised_blocks(module.drafter.block_size)).double()
        return float(weights_G @ counts_G)

    total, loss, sums = sum(weight(part) for part in parts), 0.0, {}
    for part in parts:
        module.zero_grad()
        result: StepSums = step.backward(part, run.source)
        share = weight(part) / total
        loss += share * result.loss
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0.0) + share * parameter.grad.to_dense()
    return loss, sums


def test_a_packed_step_is_its_blocks_one_by_one(run: Run) -> None:
    drafter = start_drafter(run, tap_scale(run.source, run.training_rows)).drafter
    module = TrainingStep(
        drafter,
        TargetHead.of(drafter, run.target.model),
        run.recipe.loss.settings(),
        autocast=False,
        confidence_reaches_backbone=True,
    )
    rows = (*run.training_rows, *run.held_out_rows)
    assert {row.id.split("/")[1] for row in rows} == SPANS.keys()
    anchors = tuple(anchor_positions(row.response_spans) for row in rows)  # all there are, the very last ones too
    whole = StepBlocks(rows=rows, anchors=anchors)
    single = [
        StepBlocks(rows=(row,), anchors=(np.array([anchor]),))
        for row, positions in zip(rows, anchors, strict=True)
        for anchor in positions
    ]
    assert len(single) == whole.num_blocks
    step = ParallelStep(module, World.single("cpu"))
    expected_loss, expected = gradients(step, module, single, run)
    loss, found = gradients(step, module, [whole], run)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    parts = ParallelStep(module, World.single("cpu"), accumulate=5)
    assert gradients(parts, module, [whole], run)[0] == pytest.approx(expected_loss, rel=1e-5)

from __future__ import annotations

import pytest
import torch

from dspark.training.batches import draw_step
from dspark.training.distributed import World
from dspark.training.forward import TargetHead
from dspark.training.run import Run, batch_order, plan_run, prepare_run
from dspark.training.start import start_drafter
from dspark.training.step import ParallelStep, TrainingStep, compile_backend
from dspark.training.tap_scale import tap_scale
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("step")
    target = tiny_target(sharpness=8.0)
    data = write_rows(root / "data", greedy_rows(target, rows=8, copies=3))
    return prepare_run(plan_run(tiny_recipe(data, root / "run"), target), resume=True)


def gradients_of_steps(run: Run, steps: int, backend: str | None) -> list[dict[str, torch.Tensor]]:
    recipe = run.recipe
    drafter = start_drafter(run, tap_scale(run.source, run.training_rows)).drafter
    head = TargetHead.of(drafter, run.target.model)
    step = TrainingStep(drafter, head, recipe.loss.settings(), autocast=False, confidence_reaches_backbone=False)
    parallel = ParallelStep(step, World.single("cpu"), compile_backend=backend)
    order = batch_order(run)
    found = []
    for index in range(steps):
        drafter.zero_grad()
        parallel.backward(draw_step(order.batch(index), seed=recipe.seed, step=index), run.source)
        found.append({name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None})
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler's own making
def test_compiled_layers_give_the_same_gradients_from_one_graph(run: Run) -> None:
    """Every step packs other numbers of tokens and blocks; none of them may compile again."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, compiled = gradients_of_steps(run, 4, None), gradients_of_steps(run, 4, "aot_eager")
    for one, two in zip(plain, compiled, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_missing_compiler_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"batch.compile needs a C\+\+ compiler and no-such-compiler is not there"):
        compile_backend()

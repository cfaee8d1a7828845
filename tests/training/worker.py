"""One process of a run that a test starts: ``python -m tests.training.worker jobs.json``, alone or under torchrun."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dspark.models.loading import LoadedTarget
from dspark.training.batches import StepBlocks, draw_step
from dspark.training.distributed import WorkerLostError, World
from dspark.training.forward import TargetHead
from dspark.training.loop import DivergenceError, StepResult, Trainer
from dspark.training.recipe import Recipe
from dspark.training.run import Run, batch_order, plan_run, prepare_run
from dspark.training.start import start_drafter
from dspark.training.states import RowStates, StateSource, StoredRow, StoreSpec
from dspark.training.step import ParallelStep, TrainingStep
from dspark.training.tap_scale import tap_scale
from tests.training.tiny import tiny_recipe, tiny_target


def open_run(job: dict[str, Any], target: LoadedTarget, world: World) -> Run:
    """The run of a job, prepared by the main process first."""
    recipe = tiny_recipe(Path(job["data"]), Path(job["out"]), **job["sections"])
    if "drafter" in job:
        recipe = Recipe.model_validate({**recipe.model_dump(mode="json"), "drafter": job["drafter"]})
    return prepare_run(plan_run(recipe, target), resume=True, world=world)


def first_gradients(run: Run, world: World, rows: int | None) -> dict[str, Any]:
    """Loss, its terms and all gradients of a run's first step, or of that many rows of it."""
    recipe = run.recipe
    drafter = start_drafter(run, tap_scale(run.source, run.training_rows)).drafter
    if not world.is_main:
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.requires_grad:
                    parameter.zero_()  # the main process's parameters are what counts
    step = TrainingStep(
        drafter,
        TargetHead.of(drafter, run.target.model),
        recipe.loss.settings(),
        autocast=recipe.batch.autocasts_on(drafter.device),
        confidence_reaches_backbone=recipe.loss.confidence_reaches_backbone,
    )
    parallel = ParallelStep(step, world, strategy=recipe.distributed.strategy, accumulate=recipe.batch.accumulate)
    blocks = draw_step(batch_order(run).batch(0), seed=recipe.seed, step=0)
    if rows is not None:
        blocks = StepBlocks(rows=blocks.rows[:rows], anchors=blocks.anchors[:rows])
    sums = parallel.backward(blocks, run.source)
    gradients = {}
    for name, parameter in drafter.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = gradient.to_dense()
    return {
        "loss": sums.loss,
        "terms": (sums.cross_entropy, sums.l1_distance, sums.confidence_bce, sums.acceptance.value),
        "block_tokens": sums.block_tokens,
        "gradients": gradients,
        "whole": {name: tensor.detach() for name, tensor in parallel.whole_drafter().state_dict().items()},
    }


class Poisoned:
    """Teacher states that are not finite from the third time on that they are read: scales, first step, second step."""

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self._reads = 0

    @property
    def spec(self) -> StoreSpec:
        return self._source.spec

    @property
    def rows(self) -> tuple[StoredRow, ...]:
        return self._source.rows

    def read(self, rows: Sequence[StoredRow], ends: Sequence[int] | None = None) -> list[RowStates]:
        self._reads += 1
        states = self._source.read(rows, ends)
        factor = float("nan") if self._reads > 3 else 1.0  # the start reads twice
        return [replace(state, taps_ST=state.taps_ST * factor) for state in states]


def train(job: dict[str, Any], run: Run, world: World) -> None:
    """Train.

    A job may have ``terminate: (rank, step)``: that process sends itself SIGTERM after that step; ``poison``: a rank
    whose teacher states are not finite from the second step on; ``full_disk: step``: from there on the main process
    can write small files only; ``fails``: the error is written to a file instead of raised; ``pause_s``: after steps.
    """
    if job.get("poison") == world.rank:
        run = replace(run, source=Poisoned(run.source))
    trainer = Trainer(run, resume=True, world=world)
    rank, step = job.get("terminate", (None, None))
    if rank == world.rank:

        def terminate() -> None:
            while trainer.step < step:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=terminate, daemon=True).start()

    with ExitStack() as stack:

        def on_step(result: StepResult) -> None:
            time.sleep(job.get("pause_s", 0.0))
            if result.step == job.get("full_disk"):
                stack.enter_context(small_files())

        if "fails" not in job:
            trainer.run(on_step=on_step)
            return
        try:
            trainer.run(on_step=on_step)
        except (DivergenceError, OSError, WorkerLostError) as error:
            Path(f"{job['out']}.rank-{world.rank}").write_text(f"{type(error).__name__}: {error}")


@contextmanager
def small_files(limit: int = 10_000) -> Iterator[None]:
    """Let every write beyond that many bytes of a file fail, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def main(jobs_file: Path) -> None:
    """Do all jobs."""
    torch.set_num_threads(1)
    jobs = json.loads(jobs_file.read_text())
    target = tiny_target(sharpness=8.0)
    with World.start("cpu", timeout_s=120.0) as world:
        for job in jobs:
            run = open_run(job, target, world)
            if "gradients" in job:
                result = first_gradients(run, world, job.get("rows"))
                if world.is_main:
                    torch.save(result, job["gradients"])
            else:
                train(job, run, world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

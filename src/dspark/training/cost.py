"""What a run will take, from a short measurement of the very work it will do."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.drafters.registry import drafter_from_target
from dspark.training.batches import BatchOrder, draw_step
from dspark.training.distributed import World
from dspark.training.drafter_config import drafter_config
from dspark.training.forward import TargetHead
from dspark.training.optimisers import Optimisers
from dspark.training.run import RunPlan
from dspark.training.states import OnlineStates, RowStates, StoredRow, StoreSpec, cut_spans
from dspark.training.step import ParallelStep, TrainingStep

__all__ = ["RunCost", "measure_cost"]

_TIMED_STEPS = 2
_WARM_UP_TOKENS = 128
_MOST_TOKENS = 4096
_EVALUATION_SHARE_OF_STEP = 0.4  # a forward pass without a backward one


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Estimate of a whole run in one process.

    Attributes:
        trained_parameters: numbers that are trained.
        states_seconds: for the teacher states that are missing on disk; 0 when they are computed online.
        step_seconds: of one training step, its states included when they are computed online.
        training_seconds: of all steps and held-out evaluations.
        peak_bytes: most memory seen during the measurement: of the accelerator, or of the process on a CPU.
    """

    trained_parameters: int
    states_seconds: float
    step_seconds: float
    training_seconds: float
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Of everything."""
        return self.states_seconds + self.training_seconds


def measure_cost(plan: RunPlan) -> RunCost:
    """Compute the states of some rows and train a throw-away drafter on them for three steps.

    Takes about as long as four steps. Nothing is written.
    """
    recipe, target = plan.recipe, plan.target.model
    max_length = plan.spec.max_length
    wanted = recipe.batch.blocks_per_step * recipe.batch.anchor_every_tokens
    sample, tokens, responses = [], 0, 0
    for row in plan.usable_rows:
        sample.append(row)
        tokens += min(len(row.token_ids), max_length)
        responses += sum(end - start for start, end in cut_spans(row, max_length))
        if responses >= wanted or tokens >= _MOST_TOKENS:
            break
    if target.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(target.device)
    online = OnlineStates(target, sample, plan.spec, tokens_per_batch=recipe.states.tokens_per_batch)
    online.read(online.rows[:1], [_WARM_UP_TOKENS])
    began = time.perf_counter()
    states = online.read(online.rows)
    token_seconds = (time.perf_counter() - began) / max(1, sum(row.length for row in online.rows))

    config = drafter_config(recipe, plan.target)
    drafter = drafter_from_target(
        config,
        target,
        torch.arange(config.draft_vocab_size) if config.has_reduced_vocabulary else None,
        generator=torch.Generator().manual_seed(0),
    )
    autocast = recipe.batch.autocasts_on(drafter.device)
    optimisers = Optimisers(
        drafter,
        recipe.optimiser,
        torch.ones(len(plan.spec.tap_layers) * plan.spec.hidden_size),
        muon_dtype=torch.bfloat16 if autocast else torch.float32,  # as in the run
    )
    step = ParallelStep(
        TrainingStep(
            drafter,
            TargetHead.of(drafter, target),
            recipe.loss.settings(),
            autocast=autocast,
            confidence_reaches_backbone=recipe.loss.confidence_reaches_backbone,
        ),
        World.single(drafter.device),
        accumulate=recipe.batch.accumulate,
    )
    kept = _KeptStates(plan.spec, online.rows, states)
    order = BatchOrder(
        kept.rows,
        blocks_per_step=recipe.batch.blocks_per_step,
        anchor_every_tokens=recipe.batch.anchor_every_tokens,
        seed=recipe.seed,
    )
    seconds = block_tokens = 0.0
    for number in range(1 + _TIMED_STEPS):
        began = time.perf_counter()
        optimisers.zero_grad()
        sums = step.backward(draw_step(order.batch(number), seed=recipe.seed, step=number), kept)
        optimisers.clip()
        optimisers.step(0.0)
        if number > 0:
            seconds, block_tokens = seconds + time.perf_counter() - began, block_tokens + sums.block_tokens
    # The sample may be smaller than a step; what a step costs besides its tokens is then counted a little too often.
    step_seconds = seconds / block_tokens * plan.block_tokens_per_step
    block_seconds = step_seconds / recipe.batch.blocks_per_step
    online_seconds = 0.0  # of the states of one block
    if recipe.states.source == "online":
        online_seconds = recipe.batch.anchor_every_tokens * plan.tokens / max(1, plan.response_tokens) * token_seconds
    step_seconds += recipe.batch.blocks_per_step * online_seconds
    held_out_blocks = plan.response_tokens * recipe.held_out.fraction / recipe.batch.anchor_every_tokens
    evaluated = recipe.batch.steps / recipe.held_out.every_steps * min(recipe.held_out.blocks, held_out_blocks)
    evaluation_seconds = evaluated * (_EVALUATION_SHARE_OF_STEP * block_seconds + online_seconds)
    states_seconds = plan.estimate.tokens * token_seconds
    return RunCost(
        trained_parameters=optimisers.num_parameters,
        states_seconds=states_seconds,
        step_seconds=step_seconds,
        training_seconds=recipe.batch.steps * step_seconds + evaluation_seconds,
        peak_bytes=_peak_bytes(target.device),
    )


class _KeptStates:
    """States of a few rows, computed before (a ``StateSource``)."""

    def __init__(self, spec: StoreSpec, rows: tuple[StoredRow, ...], states: Sequence[RowStates]) -> None:
        self.spec = spec
        self.rows = rows
        self._states = {row.id: row_states for row, row_states in zip(rows, states, strict=True)}

    def read(self, rows: Sequence[StoredRow], ends: Sequence[int] | None = None) -> list[RowStates]:
        return [self._states[row.id] for row in rows]


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

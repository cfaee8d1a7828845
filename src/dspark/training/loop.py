"""The training loop: step, evaluate, keep, and go on after any interruption as if nothing had happened."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.registry import TrainableDrafter
from dspark.heap import trim_heap
from dspark.training.batches import draw_step
from dspark.training.checkpoints import CHECKPOINTS, CheckpointDirectory
from dspark.training.distributed import World
from dspark.training.forward import TargetHead
from dspark.training.held_out import HeldOutResult, evaluate_held_out
from dspark.training.interruption import StopWish, listening
from dspark.training.optimisers import Optimisers
from dspark.training.provenance import provenance
from dspark.training.run import Run, batch_order
from dspark.training.run_log import RunLog
from dspark.training.schedule import learning_rate_factor
from dspark.training.start import start_drafter
from dspark.training.step import ParallelStep, TrainingStep, compile_backend
from dspark.training.tap_scale import tap_scale
from dspark.training.tracking import Tracker, held_out_curves, open_tracker

__all__ = ["DivergenceError", "StepResult", "Trainer", "TrainingResult"]

_DRAFTER_DIRECTORY = "drafter"
_TRIM_EVERY_STEPS = 64
_UNTRACKED = ("step", "epoch", "block_tokens")


class DivergenceError(ValueError):
    """The loss or its gradient is not a finite number."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step of all processes, as it is logged.

    Attributes:
        step: steps done, this one included.
        loss: the objective.
        cross_entropy, l1_distance, confidence_bce: its terms, weighted over slots as in the objective.
        accepted_length: expected accepted length on this batch at temperature 1, before the step.
        gradient_norm: before clipping.
        learning_rate_factor: of the peak rates.
        epoch: passes over the data begun before.
        block_tokens: supervised slots.
        seconds: of the whole step.
        tokens_per_second: supervised slots per second.
    """

    step: int
    loss: float
    cross_entropy: float
    l1_distance: float
    confidence_bce: float | None
    accepted_length: float
    gradient_norm: float
    learning_rate_factor: float
    epoch: int
    block_tokens: int
    seconds: float
    tokens_per_second: float

    def curves(self) -> dict[str, float]:
        """The numbers to track, by curve."""
        return {
            f"train/{name}": value
            for name, value in asdict(self).items()
            if name not in _UNTRACKED and value is not None
        }


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        end: ``finished`` all steps, ``early_stop`` for lack of progress, or ``interrupted`` (and saved).
        steps: steps done.
        best_step: of the checkpoint with the best held-out accepted length at temperature 1; ``best`` is its
            evaluation.
        drafter: directory of the best drafter; None when the run was interrupted before an evaluation.
    """

    end: Literal["finished", "early_stop", "interrupted"]
    steps: int
    best_step: int | None
    best: dict[str, Any] | None
    last: dict[str, Any] | None
    drafter: Path | None


@dataclass
class _Progress:
    """What a checkpoint remembers besides weights and optimisers."""

    step: int = 0
    best_step: int | None = None
    best: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    evaluations_since_best: int = 0


class Trainer:
    """Trains one drafter on the rows of a run, in one process or in all processes of a `World` together.

    Every random choice is a function of the seed and the step, so weights, optimiser state and step are all that a
    checkpoint needs for the same loss curve, in any number of processes.
    """

    def __init__(
        self,
        run: Run,
        *,
        resume: bool,
        world: World | None = None,
        on_bigram_step: Callable[[int, float], None] | None = None,
    ) -> None:
        """Load the last checkpoint of the run, or make its first drafter.

        Args:
            run: the run, prepared in every process.
            resume: whether to go on from its last checkpoint; the main process's choice counts.
            world: the processes of the run, all of which must come here; by default one.
            on_bigram_step: called with step and loss of the start's bigram fit.

        Raises:
            ValueError: a checkpoint is damaged or does not fit, or a compiler is not installed.
        """
        recipe = run.recipe
        backend = compile_backend() if recipe.batch.compile else None
        self._run = run
        self._recipe = recipe
        self._world = world or World.single(recipe.device)
        self._checkpoints = CheckpointDirectory(recipe.out / CHECKPOINTS, keep=recipe.checkpoint.keep)
        self._run_log = RunLog(recipe.out)
        self._progress = _Progress()
        self._wish = StopWish()
        checkpoint = self._world.broadcast_object(self._last_checkpoint(resume) if self._world.is_main else None)
        state: dict[str, Any] | None = None
        # One for all: replicas whose updates differ in the last bit would drift apart.
        tap_scale_T = self._world.broadcast_object(tap_scale(run.source, run.training_rows))
        if checkpoint is not None:
            state = self._checkpoints.load_state(checkpoint)
            self._drafter = load_drafter(
                self._checkpoints.path(checkpoint),
                run.target.model,
                device=self._world.device,
                dtype=torch.float32,
                calibrated=False,
            )
            self._progress = _Progress(**json.loads(state["progress"]))
            self._facts: dict[str, Any] = json.loads(state["facts"])
        else:
            start = start_drafter(run, tap_scale_T, on_bigram_step=on_bigram_step)
            self._drafter = start.drafter
            self._facts = {"draft_vocabulary_coverage": start.coverage}
            if start.markov is not None:
                self._facts["bigram"] = {
                    "unigram_nats": start.markov.unigram_nats,
                    "bigram_nats": start.markov.bigram_nats,
                }
        self._head = TargetHead.of(self._drafter, run.target.model)
        autocast = recipe.batch.autocasts_on(run.target.model.device)
        self._gradients = ParallelStep(
            TrainingStep(
                self._drafter,
                self._head,
                recipe.loss.settings(),
                autocast=autocast,
                confidence_reaches_backbone=recipe.loss.confidence_reaches_backbone,
            ),
            self._world,
            strategy=recipe.distributed.strategy,
            accumulate=recipe.batch.accumulate,
            compile_backend=backend,
        )
        self._optimisers = Optimisers(
            self._drafter,
            recipe.optimiser,
            tap_scale_T,
            world=self._world,
            muon_dtype=torch.bfloat16 if autocast else torch.float32,
        )
        if state is not None:
            self._optimisers.load_state_dict(state["optimisers"])
        self._order = batch_order(run)

    @property
    def drafter(self) -> TrainableDrafter:
        """The drafter as it is now; with ``fsdp`` its parameters are this process's shards."""
        return self._drafter

    @property
    def step(self) -> int:
        """Steps done."""
        return self._progress.step

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return self._optimisers.num_parameters

    @property
    def facts(self) -> dict[str, Any]:
        """What the start found: coverage of the draft vocabulary, the bigram fit."""
        return dict(self._facts)

    def run(
        self,
        *,
        on_step: Callable[[StepResult], None] | None = None,
        on_held_out: Callable[[int, HeldOutResult], None] | None = None,
    ) -> TrainingResult:
        """Train to the last step. SIGINT or SIGTERM in any process ends it after the current step, with a checkpoint.

        Only the main process logs and calls back; all return the same result.

        Raises:
            DivergenceError: the loss is not finite; the last checkpoint is untouched.
            WorkerLostError: another process ended; the last checkpoint is where all go on.
            OSError: a checkpoint or the log could not be written; the last checkpoint is untouched.
        """
        with self._world.watching():
            return self._run_here(on_step, on_held_out)

    def _run_here(
        self, on_step: Callable[[StepResult], None] | None, on_held_out: Callable[[int, HeldOutResult], None] | None
    ) -> TrainingResult:
        if not self._world.is_main:
            return self._train(None, None, None)
        self._run_log.trim(self._progress.step)
        self._log("start", step=self._progress.step, **self._facts, data_fingerprint=self._run.data_fingerprint)
        tracker = open_tracker(
            self._recipe.tracking,
            self._recipe.out,
            self._recipe.model_dump(mode="json"),
            done_steps=self._progress.step,
        )
        try:
            return self._train(tracker, on_step, on_held_out)
        finally:
            tracker.close()

    def _train(
        self,
        tracker: Tracker | None,
        on_step: Callable[[StepResult], None] | None,
        on_held_out: Callable[[int, HeldOutResult], None] | None,
    ) -> TrainingResult:
        """`run`; ``tracker`` is that of the main process."""
        recipe, progress = self._recipe, self._progress
        end: Literal["finished", "early_stop", "interrupted"] = "finished"
        saved = progress.step
        with listening(self._wish):
            while progress.step < recipe.batch.steps:
                patience = recipe.held_out.patience
                if patience is not None and progress.evaluations_since_best >= patience:
                    end = "early_stop"
                    break
                if self._world.any(self._wish.made):
                    end = "interrupted"
                    break
                result = self._step()
                if tracker is not None:
                    self._log("step", **asdict(result))
                    tracker.log(result.step, result.curves())
                    if on_step is not None:
                        on_step(result)
                if progress.step % _TRIM_EVERY_STEPS == 0:
                    trim_heap()
                last = progress.step == recipe.batch.steps
                is_best = False
                if last or progress.step % recipe.held_out.every_steps == 0:
                    is_best = self._evaluate(tracker, on_held_out)
                if last or is_best or progress.step % recipe.checkpoint.every_steps == 0:
                    self._save()
                    saved = progress.step
            if saved != progress.step:
                self._save()
        directory = None
        if end != "interrupted" and progress.best_step is not None:
            best_step, directory = progress.best_step, recipe.out / _DRAFTER_DIRECTORY
            self._world.on_main(lambda: self._checkpoints.publish(best_step, recipe.out / _DRAFTER_DIRECTORY))
        self._log("end", step=progress.step, end=end, best_step=progress.best_step)
        return TrainingResult(
            end=end,
            steps=progress.step,
            best_step=progress.best_step,
            best=progress.best,
            last=progress.last,
            drafter=directory,
        )

    def _step(self) -> StepResult:
        began = time.perf_counter()
        recipe, step = self._recipe, self._progress.step
        self._optimisers.zero_grad()
        blocks = draw_step(self._order.batch(step), seed=recipe.seed, step=step)
        sums = self._gradients.backward(blocks, self._run.source)
        norm = self._optimisers.clip()
        if not math.isfinite(sums.loss) or not math.isfinite(norm):
            raise DivergenceError(self._divergence(step + 1, sums.loss))
        factor = learning_rate_factor(
            step,
            warmup_steps=recipe.batch.warmup_steps,
            total_steps=recipe.batch.steps,
            final_fraction=recipe.batch.final_learning_rate_fraction,
        )
        self._optimisers.step(factor)
        self._progress.step = step + 1
        seconds = time.perf_counter() - began
        return StepResult(
            step=step + 1,
            loss=sums.loss,
            cross_entropy=sums.cross_entropy,
            l1_distance=sums.l1_distance,
            confidence_bce=sums.confidence_bce if self._drafter.has_confidence_head else None,
            accepted_length=sums.acceptance.value,
            gradient_norm=norm,
            learning_rate_factor=factor,
            epoch=self._order.epoch(step),
            block_tokens=sums.block_tokens,
            seconds=seconds,
            tokens_per_second=sums.block_tokens / seconds,
        )

    def _evaluate(self, tracker: Tracker | None, on_held_out: Callable[[int, HeldOutResult], None] | None) -> bool:
        """Evaluate; whether this is the best accepted length so far."""
        recipe, progress = self._recipe, self._progress
        result = evaluate_held_out(
            self._gradients.whole_drafter(),
            self._head,
            self._run.source,
            self._run.held_out_rows,
            blocks=recipe.held_out.blocks,
            anchor_every_tokens=recipe.batch.anchor_every_tokens,
            settings=recipe.loss.settings(),
            world=self._world,
        )
        progress.last = asdict(result)
        if tracker is not None:
            self._log("held_out", step=progress.step, **progress.last)
            tracker.log(progress.step, held_out_curves(result))
            if on_held_out is not None:
                on_held_out(progress.step, result)
        is_best = progress.best is None or result.sampled.value > progress.best["sampled"]["value"]
        if is_best:
            progress.best, progress.best_step, progress.evaluations_since_best = progress.last, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        return is_best

    def _save(self) -> None:
        """Write a checkpoint: all processes gather what they have, the main one writes."""
        progress = self._progress
        drafter = self._gradients.whole_drafter()
        state = {
            "optimisers": self._optimisers.state_dict(),
            "progress": json.dumps(asdict(progress)),
            "facts": json.dumps(self._facts),
        }
        self._world.on_main(
            lambda: self._checkpoints.save(
                progress.step, drafter, state, self._provenance(), best_step=progress.best_step
            )
        )

    def _provenance(self) -> dict[str, Any]:
        run = self._run
        return provenance(
            recipe=self._recipe.model_dump(mode="json"),
            processes={
                "world_size": self._world.world_size,
                "strategy": None if self._world.is_single else self._recipe.distributed.strategy,
                "device": self._world.device.type,
            },
            target={"name": run.target.name, "fingerprint": run.source.spec.target_fingerprint},
            data={
                "fingerprint": run.data_fingerprint,
                "training_rows": len(run.training_rows),
                "held_out_rows": len(run.held_out_rows),
            },
            held_out=self._progress.last,
            **self._facts,
        )

    def _last_checkpoint(self, resume: bool) -> int | None:
        """Step to go on from; a run that starts anew first loses its checkpoints."""
        steps = self._checkpoints.steps() if resume and self._run.continues else []
        if not steps:
            self._checkpoints.remove_all()
        return steps[-1] if steps else None

    def _divergence(self, step: int, loss: float) -> str:
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
        return (
            f"step {step}: {what}; {self._checkpoints.describe_last()}. Lower optimiser.muon_learning_rate and "
            "optimiser.learning_rate, lengthen batch.warmup_steps, or set batch.autocast=false"
        )

    def _log(self, event: str, **values: Any) -> None:
        if self._world.is_main:
            self._run_log.write(event, **values)

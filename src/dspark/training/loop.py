"""The training loop: step, evaluate, keep, and go on after any interruption as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.accepted_length import accepted_length
from dspark.training.batches import TrainingBatch, load_batch
from dspark.training.checkpoints import CheckpointDirectory
from dspark.training.forward import predict_slots, target_column_of_id
from dspark.training.held_out import HeldOutResult, evaluate_held_out
from dspark.training.objective import ObjectiveTerms, objective, slot_weights
from dspark.training.optimisers import Optimisers
from dspark.training.provenance import provenance
from dspark.training.run import Run, batch_order, start_drafter
from dspark.training.schedule import learning_rate_factor
from dspark.training.tap_scale import tap_scale

__all__ = ["DivergenceError", "StepResult", "Trainer", "TrainingResult"]

_LOG_FILE = "log.jsonl"
_DRAFTER_DIRECTORY = "drafter"


class DivergenceError(ValueError):
    """The loss or its gradient is not a finite number."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step, as it is logged.

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
    """Trains one drafter on the rows of a run.

    Every random choice is a function of the seed and the step, so weights, optimiser state and step are all that a
    checkpoint needs for the same loss curve.
    """

    def __init__(self, run: Run, *, resume: bool, on_bigram_step: Callable[[int, float], None] | None = None) -> None:
        """Load the last checkpoint of the run, or make its first drafter.

        Raises:
            ValueError: a checkpoint is damaged or does not fit.
        """
        recipe = run.recipe
        self._run = run
        self._recipe = recipe
        self._out = recipe.out
        self._checkpoints = CheckpointDirectory(recipe.out / "checkpoints", keep=recipe.checkpoint.keep)
        steps = self._checkpoints.steps() if resume and run.continues else []
        if not steps:
            self._checkpoints.remove_all()
        self._progress = _Progress()
        self._facts: dict[str, Any] = {}
        tap_scale_T = tap_scale(run.store, run.training_rows)
        if steps:
            state = self._checkpoints.load_state(steps[-1])
            self._drafter = load_drafter(
                self._checkpoints.path(steps[-1]), run.target.model, device=recipe.device, dtype=torch.float32
            )
            self._optimisers = Optimisers(self._drafter, recipe.optimiser, tap_scale_T)
            self._optimisers.load_state_dict(state["optimisers"])
            self._progress = _Progress(**json.loads(state["progress"]))
            self._facts = json.loads(state["facts"])
        else:
            start = start_drafter(run, tap_scale_T, on_bigram_step=on_bigram_step)
            self._drafter = start.drafter
            self._optimisers = Optimisers(self._drafter, recipe.optimiser, tap_scale_T)
            self._facts = {"draft_vocabulary_coverage": start.coverage}
            if start.markov is not None:
                self._facts["bigram"] = {
                    "unigram_nats": start.markov.unigram_nats,
                    "bigram_nats": start.markov.bigram_nats,
                }
        self._order = batch_order(run)
        self._columns_V = target_column_of_id(self._drafter)
        self._weights_G = slot_weights(self._drafter.block_size, recipe.loss.decay).to(
            self._drafter.device, torch.float32
        )
        self._stop = False

    @property
    def drafter(self) -> DSparkDrafter:
        """The drafter as it is now."""
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
        """Train to the last step. SIGINT and SIGTERM end it after the current step, with a checkpoint.

        Raises:
            DivergenceError: the loss is not finite; the last checkpoint is untouched.
        """
        recipe, progress = self._recipe, self._progress
        self._trim_log()
        self._log("start", step=progress.step, **self._facts, data_fingerprint=self._run.data_fingerprint)
        end: Literal["finished", "early_stop", "interrupted"] = "finished"
        saved = progress.step
        with self._signals():
            while progress.step < recipe.batch.steps:
                patience = recipe.held_out.patience
                if patience is not None and progress.evaluations_since_best >= patience:
                    end = "early_stop"
                    break
                if self._stop:
                    end = "interrupted"
                    break
                result = self._step()
                self._log("step", **asdict(result))
                if on_step is not None:
                    on_step(result)
                last = progress.step == recipe.batch.steps
                is_best = False
                if last or progress.step % recipe.held_out.every_steps == 0:
                    is_best = self._evaluate(on_held_out)
                if last or is_best or progress.step % recipe.checkpoint.every_steps == 0:
                    self._save()
                    saved = progress.step
            if saved != progress.step:
                self._save()
        directory = self._publish() if end != "interrupted" and progress.best_step is not None else None
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
        batch = load_batch(
            self._run.store,
            self._order.batch(step),
            block_size=self._drafter.block_size,
            seed=recipe.seed,
            step=step,
            device=self._drafter.device,
        )
        terms, weights_N = self._forward(batch)
        loss = terms.loss.item()
        self._optimisers.zero_grad()
        if math.isfinite(loss):
            terms.loss.backward()
            norm = self._optimisers.clip()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise DivergenceError(self._divergence(step + 1, loss))
        factor = learning_rate_factor(
            step,
            warmup_steps=recipe.batch.warmup_steps,
            total_steps=recipe.batch.steps,
            final_fraction=recipe.batch.final_learning_rate_fraction,
        )
        self._optimisers.step(factor)
        self._progress.step = step + 1
        total = float(weights_N.sum())
        keep_BA = batch.supervised_BAG[..., 0]
        acceptance_BAG = torch.zeros(batch.supervised_BAG.shape, device=weights_N.device)
        acceptance_BAG[batch.supervised_BAG] = terms.draft.acceptance_N
        return StepResult(
            step=step + 1,
            loss=loss,
            cross_entropy=float(weights_N @ terms.draft.cross_entropy_N) / total,
            l1_distance=float(weights_N @ terms.draft.l1_distance_N) / total,
            confidence_bce=None
            if terms.confidence_bce_N is None
            else float(weights_N @ terms.confidence_bce_N) / total,
            accepted_length=accepted_length(acceptance_BAG[keep_BA], batch.supervised_BAG[keep_BA]).value,
            gradient_norm=norm,
            learning_rate_factor=factor,
            epoch=self._order.epoch(step),
            block_tokens=len(weights_N),
            seconds=time.perf_counter() - began,
        )

    def _forward(self, batch: TrainingBatch) -> tuple[ObjectiveTerms, torch.Tensor]:
        recipe = self._recipe
        slots = predict_slots(
            self._drafter,
            batch,
            self._columns_V,
            final_softcap=self._run.store.spec.final_softcap,
            autocast=recipe.batch.autocast,
            confidence_reaches_backbone=recipe.loss.confidence_reaches_backbone,
        )
        weights_N = self._weights_G[slots.slot_N]
        terms = objective(
            logits_ND=slots.logits_ND,
            target_logits_ND=slots.target_logits_ND,
            target_log_normaliser_N=slots.target_log_normaliser_N,
            label_columns_N=slots.label_columns_N,
            slot_weights_N=weights_N,
            settings=recipe.loss.settings(),
            confidence_logits_N=slots.confidence_logits_N,
        )
        return terms, weights_N

    def _evaluate(self, on_held_out: Callable[[int, HeldOutResult], None] | None) -> bool:
        """Evaluate; whether this is the best accepted length so far."""
        recipe, progress = self._recipe, self._progress
        result = evaluate_held_out(
            self._drafter,
            self._run.store,
            self._run.held_out_rows,
            blocks=recipe.held_out.blocks,
            anchor_every_tokens=recipe.batch.anchor_every_tokens,
            settings=recipe.loss.settings(),
        )
        progress.last = asdict(result)
        self._log("held_out", step=progress.step, **progress.last)
        if on_held_out is not None:
            on_held_out(progress.step, result)
        is_best = progress.best is None or result.sampled.value > progress.best["sampled"]["value"]
        if is_best:
            progress.best, progress.best_step, progress.evaluations_since_best = progress.last, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        return is_best

    def _save(self) -> None:
        progress = self._progress
        state = {
            "optimisers": self._optimisers.state_dict(),
            "progress": json.dumps(asdict(progress)),
            "facts": json.dumps(self._facts),
        }
        origin = provenance(
            recipe=self._recipe.model_dump(mode="json"),
            target={"name": self._run.target.name, "fingerprint": self._run.store.spec.target_fingerprint},
            data={
                "fingerprint": self._run.data_fingerprint,
                "training_rows": len(self._run.training_rows),
                "held_out_rows": len(self._run.held_out_rows),
            },
            held_out=progress.last,
            **self._facts,
        )
        self._checkpoints.save(progress.step, self._drafter, state, origin, best_step=progress.best_step)

    def _publish(self) -> Path:
        """Copy the best checkpoint's drafter to ``drafter/``."""
        assert self._progress.best_step is not None
        source = self._checkpoints.path(self._progress.best_step)
        final = self._out / _DRAFTER_DIRECTORY
        temporary = self._out / f".{_DRAFTER_DIRECTORY}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("training_state.pt"))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        return final

    def _divergence(self, step: int, loss: float) -> str:
        steps = self._checkpoints.steps()
        kept = (
            f"the last good checkpoint is {self._checkpoints.path(steps[-1])}"
            if steps
            else "no checkpoint was made yet"
        )
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
        return (
            f"step {step}: {what}; {kept}. Lower optimiser.muon_learning_rate and optimiser.learning_rate, lengthen "
            "batch.warmup_steps, or set batch.autocast=false"
        )

    def _log(self, event: str, **values: Any) -> None:
        with (self._out / _LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def _trim_log(self) -> None:
        """Drop what a killed run logged after its last checkpoint: those steps will be done, and logged, again."""
        path = self._out / _LOG_FILE
        if not path.exists():
            return
        kept = []
        if self._progress.step > 0:
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if line.endswith("\n") and entry.get("step", 0) <= self._progress.step:
                    kept.append(line)
        temporary = path.with_name(f".{_LOG_FILE}.{os.getpid()}")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a wish to stop; a second one acts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def ask(number: int, frame: FrameType | None) -> None:
            self._stop = True
            signal.signal(number, before[signal.Signals(number)])

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

"""``dspark train``: teacher states, bigram start, training loop."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.cli.options import OUTPUT, JsonOption

if TYPE_CHECKING:
    from dspark.training.held_out import HeldOutResult
    from dspark.training.loop import StepResult, Trainer, TrainingResult
    from dspark.training.run import Run, RunPlan

RUN = Group("Run", sort_key=1)


def train(
    recipe: Annotated[Path, Parameter(help="Recipe in YAML, such as `recipes/smollm2-135m.yaml`.")],
    *overrides: Annotated[str, Parameter(help="Settings that replace the recipe's: `batch.steps=400 seed=1`.")],
    data: Annotated[
        tuple[Path, ...] | None,
        Parameter(group=RUN, help="Directory made by `dspark data`; may be given several times."),
    ] = None,
    out: Annotated[Path | None, Parameter(group=RUN, help="Directory of the run.")] = None,
    target: Annotated[
        str | None,
        Parameter(group=RUN, help="The target that answered: `embedded`, a Hugging Face name, a directory, a GGUF."),
    ] = None,
    device: Annotated[str | None, Parameter(group=RUN, help="Where to train: `cpu`, `cuda`, ...")] = None,
    resume: Annotated[
        bool,
        Parameter(group=RUN, help="Go on with the run in --out; --no-resume starts it anew (teacher states are kept)."),
    ] = True,
    dry_run: Annotated[bool, Parameter(negative=(), group=OUTPUT, help="Say what it will cost, then stop.")] = False,
    json: JsonOption = False,
) -> int:
    """Train a drafter for a target on regenerated data.

    First the target's states for every row are computed and kept on disk (this is most of the disk's use), then the
    Markov head is fitted to the data's bigrams, then the drafter is trained. Everything can be interrupted and goes on
    where it was: Ctrl-C saves, and after a kill the same command continues from the last checkpoint with the same loss
    curve.

    The best drafter by accepted length on held-out rows ends up in `drafter/` of the run; `log.jsonl` there has every
    step.

    ```
    dspark train recipes/smollm2-135m.yaml
    dspark train recipes/smollm2-135m.yaml batch.steps=400 --out runs/short
    ```
    """
    from dspark.cli import EXIT_OK
    from dspark.models.loading import load_target
    from dspark.training.locking import exclusive
    from dspark.training.recipe import load_recipe
    from dspark.training.run import plan_run

    options = {"out": out, "target": target, "device": device}
    given = [f"{name}={jsonlib.dumps(str(value))}" for name, value in options.items() if value is not None]
    if data:
        given.append(f"data={jsonlib.dumps([str(directory) for directory in data])}")
    settings = load_recipe(recipe, [*overrides, *given])
    console = Console(stderr=True, quiet=json)
    loaded = load_target(settings.target, dtype=settings.states.dtype, device=settings.device)
    plan = plan_run(settings, loaded)
    _print_plan(console, plan)
    if dry_run:
        if json:
            print(jsonlib.dumps({"plan": _plan_facts(plan)}))
        return EXIT_OK
    with exclusive(settings.out / ".running"):  # not the run itself, which may be where the states are
        return _run(console, plan, resume=resume, json=json)


def _run(console: Console, plan: RunPlan, *, resume: bool, json: bool) -> int:
    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.training.loop import Trainer
    from dspark.training.run import prepare_run

    settings = plan.recipe
    with _progress(console) as progress:
        bar = progress.add_task("teacher states", total=plan.estimate.tokens, visible=plan.estimate.tokens > 0)
        run = prepare_run(plan, resume=resume, on_tokens=lambda tokens: progress.advance(bar, tokens))
    if run.new_rows:
        console.print(f"{run.new_rows:,} rows came after this run started; it goes on without them.")
    with _progress(console) as progress:
        bar = progress.add_task("bigram start", total=settings.bigram.steps, visible=False)

        def on_bigram_step(step: int, nats: float) -> None:
            progress.update(bar, completed=step, visible=True, description=f"bigram start  {nats:.3f} nats")

        trainer = Trainer(run, resume=resume, on_bigram_step=on_bigram_step)
    _print_start(console, run, trainer)
    result = _train(console, trainer, settings.batch.steps)
    if json:
        print(jsonlib.dumps({"plan": _plan_facts(plan), **trainer.facts, "result": _result_facts(result)}))
    else:
        _print_result(console, result)
    return EXIT_INTERRUPTED if result.end == "interrupted" else EXIT_OK


def _train(console: Console, trainer: Trainer, steps: int) -> TrainingResult:
    with _progress(console) as progress:
        bar = progress.add_task("training", total=steps, completed=trainer.step)

        def on_step(step: StepResult) -> None:
            progress.update(
                bar,
                completed=step.step,
                description=f"loss {step.loss:.3f}  accepted {step.accepted_length:.2f}  {step.seconds:.2f} s/step",
            )

        def on_held_out(step: int, result: HeldOutResult) -> None:
            survival = " ".join(f"{value:.2f}" for value in result.sampled.survival)
            console.print(
                f"step {step}: held-out accepted length {result.sampled.value:.3f} at temperature 1, "
                f"{result.greedy.value:.3f} greedy (survival {survival})",
                highlight=False,
            )

        return trainer.run(on_step=on_step, on_held_out=on_held_out)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _plan_facts(plan: RunPlan) -> dict[str, Any]:
    return {
        "rows": len(plan.rows),
        "tokens": plan.tokens,
        "response_tokens": plan.response_tokens,
        "states_missing": asdict(plan.estimate),
        "steps": plan.recipe.batch.steps,
        "block_tokens_per_step": plan.block_tokens_per_step,
        "epochs": round(plan.epochs, 3),
    }


def _print_plan(console: Console, plan: RunPlan) -> None:
    recipe, missing = plan.recipe, plan.estimate
    console.print(
        f"data      {', '.join(map(str, recipe.data))}: {len(plan.rows):,} rows, {plan.tokens:,} tokens, "
        f"{plan.response_tokens:,} of them answers\n"
        f"states    {recipe.states_directory}: {missing.tokens:,} tokens to compute with {plan.target.name} in "
        f"{recipe.states.dtype}, {missing.bytes / 2**30:.2f} GiB to write\n"
        f"training  {recipe.batch.steps:,} steps of {plan.block_tokens_per_step:,} block tokens, "
        f"{plan.epochs:.2f} passes over the answers, into {recipe.out}",
        highlight=False,
    )


def _print_start(console: Console, run: Run, trainer: Trainer) -> None:
    coverage = trainer.facts["draft_vocabulary_coverage"]
    place = f"goes on after step {trainer.step}" if trainer.step else "starts"
    console.print(
        f"drafter   {trainer.num_parameters / 1e6:.1f} M trained parameters; "
        f"draft vocabulary covers {100 * coverage:.2f} % of the answers; "
        f"{len(run.training_rows):,} rows to train on, {len(run.held_out_rows):,} held out; {place}",
        highlight=False,
    )


def _result_facts(result: TrainingResult) -> dict[str, Any]:
    facts = asdict(result)
    facts["drafter"] = None if result.drafter is None else str(result.drafter)
    return facts


def _print_result(console: Console, result: TrainingResult) -> None:
    if result.end == "interrupted":
        console.print(f"interrupted after step {result.steps}, saved; the same command goes on from there")
        return
    if result.best is not None and result.drafter is not None:
        console.print(
            f"best drafter: step {result.best_step}, "
            f"held-out accepted length {result.best['sampled']['value']:.3f} at temperature 1, "
            f"{result.best['greedy']['value']:.3f} greedy"
        )
        print(result.drafter)

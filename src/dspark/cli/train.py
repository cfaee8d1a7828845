"""``dspark train``: teacher states, bigram start, training loop."""

from __future__ import annotations

import json as jsonlib
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.cli.options import OUTPUT, JsonOption

if TYPE_CHECKING:
    from dspark.models.loading import LoadedTarget
    from dspark.training.cost import RunCost
    from dspark.training.distributed import World
    from dspark.training.held_out import HeldOutResult
    from dspark.training.loop import StepResult, Trainer, TrainingResult
    from dspark.training.recipe import Recipe
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

    The recipe's `drafter.kind` says which: `dspark`, `dflash`, `eagle3` or `mtp`. What it will cost is measured and
    printed before it starts. First the target's states for every row are computed and kept on disk (or computed as
    needed: `states.source=online`), then a Markov head, if any, is fitted to the bigrams, then the drafter is trained.
    Everything can be interrupted and goes on where it was: Ctrl-C saves, and after a kill the same command continues
    from the last checkpoint with the same loss curve.

    The best drafter by accepted length on held-out rows ends up in `drafter/` of the run; `log.jsonl` there has every
    step.

    ```
    dspark train recipes/smollm2-135m.yaml
    dspark train recipes/smollm2-135m.yaml batch.steps=400 --out runs/short
    torchrun --nproc-per-node 4 -m dspark train recipes/mine.yaml device=cuda
    ```
    """
    from dspark.models.loading import load_target
    from dspark.training.distributed import World
    from dspark.training.recipe import load_recipe

    options = {"out": out, "target": target, "device": device}
    given = [f"{name}={jsonlib.dumps(str(value))}" for name, value in options.items() if value is not None]
    if data:
        given.append(f"data={jsonlib.dumps([str(directory) for directory in data])}")
    settings = load_recipe(recipe, [*overrides, *given])
    with World.start(settings.device, timeout_s=60 * settings.distributed.timeout_minutes) as world:
        console = Console(stderr=True, quiet=json or not world.is_main)
        loaded = load_target(settings.target, dtype=settings.states.dtype, device=str(world.device))
        for notice in loaded.notices:
            console.print(notice, highlight=False)
        if dry_run:
            return _dry_run(console, settings, loaded, world, json=json)
        return _run(console, settings, loaded, world, resume=resume, json=json)


def _dry_run(console: Console, settings: Recipe, loaded: LoadedTarget, world: World, *, json: bool) -> int:
    from dspark.cli import EXIT_OK
    from dspark.training.cost import measure_cost
    from dspark.training.run import plan_run

    if not world.is_main:
        return EXIT_OK
    plan = plan_run(settings, loaded)
    _print_plan(console, plan)
    cost = measure_cost(plan)
    _print_cost(console, cost, world)
    if json:
        print(jsonlib.dumps({"plan": _plan_facts(plan), "cost": _cost_facts(cost)}))
    return EXIT_OK


def _run(console: Console, settings: Recipe, loaded: LoadedTarget, world: World, *, resume: bool, json: bool) -> int:
    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.files import exclusive
    from dspark.training.cost import measure_cost
    from dspark.training.loop import Trainer
    from dspark.training.run import has_run, plan_run, prepare_run

    with ExitStack() as stack:
        if world.is_main:  # the lock is not on the run itself, which may be where the states are
            stack.enter_context(exclusive(settings.out / ".running"))
        plan = plan_run(settings, loaded)
        _print_plan(console, plan)
        cost = None
        if world.is_main and not (resume and has_run(settings)):
            cost = measure_cost(plan)
            _print_cost(console, cost, world)
        with _progress(console) as progress:
            bar = progress.add_task("teacher states", total=plan.estimate.tokens, visible=plan.estimate.tokens > 0)
            run = prepare_run(plan, resume=resume, world=world, on_tokens=lambda tokens: progress.advance(bar, tokens))
        if run.new_rows:
            console.print(f"{run.new_rows:,} rows came after this run started; it goes on without them.")
        with _progress(console) as progress:
            bar = progress.add_task("bigram start", total=settings.bigram.steps, visible=False)

            def on_bigram_step(step: int, nats: float) -> None:
                progress.update(bar, completed=step, visible=True, description=f"bigram start  {nats:.3f} nats")

            trainer = Trainer(run, resume=resume, world=world, on_bigram_step=on_bigram_step)
        _print_start(console, run, trainer, world)
        result = _train(console, trainer, settings.batch.steps)
        if world.is_main and json:
            facts = {
                "plan": _plan_facts(plan),
                "cost": None if cost is None else _cost_facts(cost),
                "trained_parameters": trainer.num_parameters,
                **trainer.facts,
                "result": _result_facts(result),
            }
            print(jsonlib.dumps(facts))
        elif world.is_main:
            _print_result(console, result)
    return EXIT_INTERRUPTED if result.end == "interrupted" else EXIT_OK


def _train(console: Console, trainer: Trainer, steps: int) -> TrainingResult:
    with _progress(console) as progress:
        bar = progress.add_task("training", total=steps, completed=trainer.step)

        def on_step(step: StepResult) -> None:
            progress.update(
                bar,
                completed=step.step,
                description=f"loss {step.loss:.3f}  accepted {step.accepted_length:.2f}  "
                f"{step.tokens_per_second:,.0f} tokens/s",
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
        "notices": list(plan.notices),
    }


def _cost_facts(cost: RunCost) -> dict[str, Any]:
    return {**asdict(cost), "seconds": cost.seconds}


def _print_plan(console: Console, plan: RunPlan) -> None:
    recipe, missing = plan.recipe, plan.estimate
    for notice in plan.notices:
        console.print(notice, highlight=False)
    if recipe.states.source == "online":
        states = f"computed in every step by {plan.target.name} in {recipe.states.dtype}, nothing on disk"
    else:
        states = (
            f"{recipe.states_directory}: {missing.tokens:,} tokens to compute with {plan.target.name} in "
            f"{recipe.states.dtype}, {missing.bytes / 2**30:.2f} GiB to write"
        )
        if missing.lost_rows:
            states += f" ({missing.lost_rows:,} rows of damaged or deleted shards among them)"
    console.print(
        f"drafter   {recipe.drafter.kind} for {plan.target.name}\n"
        f"data      {', '.join(map(str, recipe.data))}: {len(plan.rows):,} rows, {plan.tokens:,} tokens, "
        f"{plan.response_tokens:,} of them answers\n"
        f"states    {states}\n"
        f"training  {recipe.batch.steps:,} steps of {plan.block_tokens_per_step:,} block tokens, "
        f"{plan.epochs:.2f} passes over the answers, into {recipe.out}",
        highlight=False,
    )


def _print_cost(console: Console, cost: RunCost, world: World) -> None:
    processes = "" if world.is_single else f" in one process ({world.world_size} share the steps)"
    console.print(
        f"cost      {_duration(cost.states_seconds)} for the states, {_duration(cost.training_seconds)} for the steps "
        f"({cost.step_seconds:.2f} s each), measured here{processes}; "
        f"{cost.trained_parameters / 1e6:.1f} M parameters to train; {cost.peak_bytes / 2**30:.1f} GiB of memory",
        highlight=False,
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _print_start(console: Console, run: Run, trainer: Trainer, world: World) -> None:
    coverage = trainer.facts["draft_vocabulary_coverage"]
    place = f"goes on after step {trainer.step}" if trainer.step else "starts"
    if not world.is_single:
        place += f" in {world.world_size} processes"
    console.print(
        f"start     {trainer.num_parameters / 1e6:.1f} M trained parameters; "
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

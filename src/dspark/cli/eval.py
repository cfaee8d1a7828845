"""``dspark eval``: how good drafters are, by benchmark and domain, against no speculation in the same run."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from dspark.cli.options import (
    EMBEDDED,
    MODELS,
    OUTPUT,
    PROMPT,
    SAMPLING,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxTokensOption,
    TargetOption,
    TemperatureOption,
)

if TYPE_CHECKING:
    from dspark.drafters.registry import TrainableDrafter
    from dspark.evaluation.benchmarks import EvaluationPrompt
    from dspark.evaluation.plan import Arm, DrafterFacts
    from dspark.models.loading import LoadedTarget

SWEEPS = Group("Sweeps", sort_key=4)

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
WARM_UP_TOKENS = 8
PIPED_WIDTH = 140
"""Columns of tables that go to a file."""


def eval(
    *,
    prompts: Annotated[
        str,
        Parameter(
            group=PROMPT,
            help="What is asked: `builtin` (24 prompts of our own), names of benchmarks, JSONL files named after their"
            " benchmark, directories of them; several with commas between.",
        ),
    ] = "builtin",
    benchmarks: Annotated[
        Path | None,
        Parameter(group=PROMPT, help="Directory with NAME.jsonl of benchmarks; what it lacks comes from the hub."),
    ] = None,
    limit: Annotated[
        int | None, Parameter(group=PROMPT, help="Prompts of a benchmark at most, chosen by --seed.")
    ] = None,
    target: TargetOption = "embedded",
    drafter: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=False,
            group=MODELS,
            help="A drafter's directory or `embedded`, `LABEL=DIRECTORY` to name it; several are compared. By default"
            " ours, for the embedded target.",
        ),
    ] = (),
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    temperature: TemperatureOption = 0.0,
    coupled: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            group=SAMPLING,
            help="Sample as requests with a seed do: the same output with speculation on or off. Otherwise by the"
            " p/q rule, which accepts more.",
        ),
    ] = False,
    seed: Annotated[
        int, Parameter(group=SAMPLING, help="Of everything that is drawn: prompts, samples, intervals.")
    ] = 0,
    max_tokens: MaxTokensOption = 256,
    baseline: Annotated[
        bool, Parameter(group=MODELS, help="Answer every prompt without speculation too, for the speed-up.")
    ] = True,
    thresholds: Annotated[
        str | None, Parameter(group=SWEEPS, help="Confidence thresholds to try, such as `0,0.2,0.4,0.6,0.8`.")
    ] = None,
    draft_tokens: Annotated[
        str | None, Parameter(group=SWEEPS, help="Draft tokens of a round to try, such as `1,3,5,7`.")
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            help=f"Directory for the answers, {REPORT_FILE} and {PAGE_FILE}; the same command goes on where it was.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure drafters on prompts: accepted length, acceptance by position, speed-up, by benchmark and domain.

    Every prompt is answered by the target alone and with every drafter, side by side. Counts are pooled over all rounds
    of all prompts; intervals are 95 % over prompts. With --out it can be interrupted and goes on where it was, and
    there is a page with the figures.

    ```
    dspark eval
    dspark eval --prompts gsm8k,humaneval,mt-bench --benchmarks DIRECTORY --limit 50 --out evaluations/first
    dspark eval --target path/to/model --drafter two=runs/two/drafter --drafter five=runs/five/drafter
    dspark eval --thresholds 0,0.2,0.4,0.6,0.8 --draft-tokens 1,3,5,7 --out evaluations/sweeps
    ```

    Benchmarks: gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench (all turns), alpaca, arena-hard-v2.
    """
    from dspark.cli.models import open_target, target_name
    from dspark.decoding.settings import SamplingSettings
    from dspark.evaluation.benchmarks import load_prompts
    from dspark.evaluation.plan import evaluation_arms

    named = _named_drafters(drafter, target)
    SamplingSettings(temperature=temperature)
    if coupled and temperature == 0:
        raise ValueError("--coupled needs --temperature above 0: a greedy output is the same either way")
    if max_tokens < 1:
        raise ValueError(f"--max-tokens is {max_tokens}; it must be at least 1")
    threshold_values = _numbers("--thresholds", thresholds, float)
    length_values = _numbers("--draft-tokens", draft_tokens, int)
    chosen = load_prompts(prompts, limit=limit, seed=seed, directory=benchmarks)
    loaded = open_target(target, dtype=dtype, device=device)
    drafters = _open_drafters(named, loaded)
    facts = [_facts(label, opened, temperature) for label, opened in drafters.items()]
    arms = evaluation_arms(facts, baseline=baseline, thresholds=threshold_values, draft_tokens=length_values)
    settings: dict[str, Any] = {
        "target": target_name(loaded),
        "target_fingerprint": loaded.model.fingerprint,
        "dtype": loaded.model.compute_dtype,
        "device": device,
        "prompts": _prompts_line(prompts),
        "limit": limit,
        "temperature": temperature,
        "coupled": coupled,
        "seed": seed,
        "max_tokens": max_tokens,
        "baseline": baseline,
    }
    return _evaluate(loaded, drafters, facts, arms, chosen, settings, out=out, json=json)


def _evaluate(
    target: LoadedTarget,
    drafters: Mapping[str, TrainableDrafter],
    facts: Sequence[DrafterFacts],
    arms: Sequence[Arm],
    prompts: Sequence[EvaluationPrompt],
    settings: Mapping[str, Any],
    *,
    out: Path | None,
    json: bool,
) -> int:
    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.cli.eval_decoding import RequestDecoder
    from dspark.evaluation.answers import AnswerLog
    from dspark.evaluation.benchmarks import prompts_digest
    from dspark.evaluation.page import report_page
    from dspark.evaluation.report import build_report
    from dspark.evaluation.runner import answer_prompts, questions_left
    from dspark.files import write_json, write_text
    from dspark.training.provenance import provenance

    decoder = RequestDecoder(
        target=target,
        drafters=drafters,
        temperature=settings["temperature"],
        coupled=settings["coupled"],
        max_tokens=settings["max_tokens"],
    )
    identity = {
        **settings,
        "prompts": prompts_digest(prompts),
        "drafters": [drafter.to_json() for drafter in facts],
        "arms": [arm.label for arm in arms],
    }
    console = Console(stderr=True, quiet=json, highlight=False, emoji=False)
    interrupted = False
    with AnswerLog.opened(out, identity) as log:
        left, given = questions_left(prompts, arms, log), len(log.records)
        try:
            with _progress(console) as progress:
                bar = progress.add_task("answers", total=given + left, completed=given)
                if left:
                    log.start_session(provenance())
                    _warm_up(decoder, arms)
                answer_prompts(
                    prompts,
                    arms,
                    decoder,
                    log,
                    seed=settings["seed"],
                    on_answer=lambda record: progress.advance(bar),
                )
        except KeyboardInterrupt:
            interrupted = True
        report = build_report(
            prompts,
            facts,
            arms,
            log.records,
            settings=settings,
            repeatable=settings["temperature"] == 0 or settings["coupled"],
            seed=settings["seed"],
            sessions=log.sessions,
        )
        if out is not None:
            write_json(out / REPORT_FILE, report)
            write_text(out / PAGE_FILE, report_page(report))
    if json:
        print(jsonlib.dumps(report))
    else:
        _print(report, out)
    if interrupted:
        print("interrupted" + ("" if out is None else ": the same command goes on from here"), file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def _named_drafters(given: Sequence[str], target: str) -> dict[str, str]:
    """Directory (or `embedded`) of every drafter, by label. Raises ValueError before anything is loaded."""
    if not given:
        if target != EMBEDDED:
            raise ValueError(f"--target {target} needs a drafter that was trained for it: give --drafter DIRECTORY")
        given = (EMBEDDED,)
    named: dict[str, str] = {}
    for spec in given:
        label, separator, place = spec.partition("=")
        if not separator or Path(spec).exists():
            label, place = _label(spec), spec
        if place != EMBEDDED and not Path(place).is_dir():
            raise ValueError(
                f"--drafter {spec}: no directory {place}; a drafter is a directory with config.json and "
                "model.safetensors"
            )
        if not label or label in named:
            raise ValueError(f"--drafter {spec}: every drafter needs a name of its own, give it as LABEL={place}")
        named[label] = place
    return named


def _label(place: str) -> str:
    """A run's drafter is called after the run, any other directory by its own name."""
    path = Path(place).resolve()
    return place if place == EMBEDDED else path.parent.name if path.name == "drafter" else path.name


def _open_drafters(named: Mapping[str, str], target: LoadedTarget) -> dict[str, TrainableDrafter]:
    from dspark.cli.models import open_drafter

    return {label: open_drafter(place, target) for label, place in named.items()}


def _facts(label: str, drafter: TrainableDrafter, temperature: float) -> DrafterFacts:
    from dspark.drafters.calibration_file import drafter_fingerprint
    from dspark.drafters.registry import drafter_kind
    from dspark.evaluation.plan import DrafterFacts

    temperatures = drafter.calibration.at(temperature) if drafter.calibration is not None else ()
    return DrafterFacts(
        label=label,
        kind=drafter_kind(drafter.config),
        num_layers=drafter.config.num_hidden_layers,
        block_size=drafter.block_size,
        parameters=sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad),
        has_confidence_head=drafter.has_confidence_head,
        fingerprint=drafter_fingerprint(drafter),
        temperatures=temperatures or None,
    )


def _numbers(option: str, text: str | None, kind: type) -> tuple[Any, ...]:
    if text is None:
        return ()
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        example = "0,0.2,0.4" if kind is float else "1,3,5"
        raise ValueError(f"{option} {text} must be numbers with commas between, such as {example}") from None


def _prompts_line(prompts: str) -> str:
    """What was asked, without the directories that only this machine has."""
    return ",".join(Path(part.strip()).name or part for part in prompts.split(","))


def _warm_up(decoder: Any, arms: Sequence[Arm]) -> None:
    from dspark.evaluation.runner import Question

    for arm in arms:
        message = {"role": "user", "content": "Hello"}
        decoder.warm_up(
            Question(arm=arm, prompt_id="warm-up", messages=(message,), random_seed=0), max_tokens=WARM_UP_TOKENS
        )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet,
    )


def _print(report: Mapping[str, Any], out: Path | None) -> None:
    from dspark.evaluation.tables import report_tables

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    one_drafter = len(report["drafters"]) == 1
    for table in report_tables(report):
        shown = RichTable(
            title=table.title,
            caption=table.note or None,
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        # A column that says the same in every row says nothing.
        first = 1 if one_drafter and len({row[0] for row in table.rows}) <= 1 else 0
        for column in table.columns[first:]:
            shown.add_column(column)
        previous = ""
        for row in table.rows:
            cells = row[first:]
            shown.add_row("" if cells[0] == previous else cells[0], *cells[1:])
            previous = cells[0]
        console.print(shown)
    for name, reason in report["skipped"].items():
        console.print(f"left out {name}: {reason}")
    if report["completed"] + len(report["skipped"]) < report["prompts"]:
        console.print(f"{report['completed']} of {report['prompts']} prompts were answered in every way")
    if out is not None:
        console.print(f"report: {out / PAGE_FILE}, numbers: {out / REPORT_FILE}")

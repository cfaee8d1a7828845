"""``dspark eval``: how good drafters are, by benchmark and domain, against no speculation in the same run."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from dspark.cli.options import (
    MODELS,
    OUTPUT,
    PROMPT,
    SAMPLING,
    BenchmarksOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    TargetOption,
    TemperatureOption,
)

if TYPE_CHECKING:
    from dspark.cli.eval_decoding import ArmDecoder
    from dspark.drafters.registry import TrainableDrafter
    from dspark.evaluation.benchmarks import EvaluationPrompt
    from dspark.evaluation.plan import Arm, DrafterFacts
    from dspark.models.loading import LoadedTarget

SWEEPS = Group("Sweeps", sort_key=4)

WARM_UP_TOKENS = 8


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
    benchmarks: BenchmarksOption = None,
    limit: LimitOption = None,
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
    concurrency: Annotated[
        int,
        Parameter(
            group=SAMPLING,
            help="Answers made at once. 1 measures what speculation is worth to a single user, more what it does for"
            " the throughput of so many.",
        ),
    ] = 1,
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
            help="Directory for the answers, report.json and report.html; the same command goes on where it was.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure drafters on prompts: accepted length, acceptance by position, speed-up, by benchmark and domain.

    Every prompt is answered by the target alone and with every drafter. Counts are pooled over all rounds of all
    prompts, and are the same whatever the --concurrency; intervals are 95 % over prompts. With --out it can be
    interrupted and goes on where it was, and there is a page with the figures.

    ```
    dspark eval
    dspark eval --prompts gsm8k,humaneval,mt-bench --benchmarks DIRECTORY --limit 50 --out evaluations/first
    dspark eval --target path/to/model --drafter two=runs/two/drafter --drafter five=runs/five/drafter
    dspark eval --thresholds 0,0.2,0.4,0.6,0.8 --draft-tokens 1,3,5,7 --out evaluations/sweeps
    dspark eval --concurrency 16
    ```

    Benchmarks: gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench (all turns), alpaca, arena-hard-v2.
    """
    from dspark.cli.eval_drafters import drafter_facts, named_drafters, open_drafters
    from dspark.cli.models import open_target
    from dspark.decoding.settings import SamplingSettings
    from dspark.evaluation.benchmarks import load_prompts
    from dspark.evaluation.plan import evaluation_arms

    named = named_drafters(drafter, target)
    SamplingSettings(temperature=temperature)
    if coupled and temperature == 0:
        raise ValueError("--coupled needs --temperature above 0: a greedy output is the same either way")
    if max_tokens < 1:
        raise ValueError(f"--max-tokens is {max_tokens}; it must be at least 1")
    if concurrency < 1:
        raise ValueError(f"--concurrency is {concurrency}; it must be at least 1")
    threshold_values = _numbers("--thresholds", thresholds, float)
    length_values = _numbers("--draft-tokens", draft_tokens, int)
    chosen = load_prompts(prompts, limit=limit, seed=seed, directory=benchmarks)
    loaded = open_target(target, dtype=dtype, device=device)
    drafters = open_drafters(named, loaded)
    facts = [drafter_facts(label, opened, temperature) for label, opened in drafters.items()]
    arms = evaluation_arms(facts, baseline=baseline, thresholds=threshold_values, draft_tokens=length_values)
    settings: dict[str, Any] = {
        "target": loaded.public_name,
        "target_fingerprint": loaded.model.fingerprint,
        "dtype": loaded.model.compute_dtype,
        "device": device,
        "prompts": _prompts_line(prompts),
        "limit": limit,
        "temperature": temperature,
        "coupled": coupled,
        "seed": seed,
        "max_tokens": max_tokens,
        "concurrency": concurrency,
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
    from rich.console import Console

    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.cli.eval_decoding import ArmDecoder
    from dspark.cli.eval_display import PAGE_FILE, REPORT_FILE, answers_progress, show_report
    from dspark.evaluation.answers import AnswerLog
    from dspark.evaluation.benchmarks import prompts_digest
    from dspark.evaluation.page import report_page
    from dspark.evaluation.report import build_report
    from dspark.evaluation.runner import answer_prompts, questions_left
    from dspark.files import write_json, write_text
    from dspark.training.provenance import provenance

    decoder = ArmDecoder(
        target=target, drafters=drafters, concurrency=settings["concurrency"], max_tokens=settings["max_tokens"]
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
            with answers_progress(console) as progress:
                bar = progress.add_task("answers", total=given + left, completed=given)
                if left:
                    log.start_session(provenance())
                    _warm_up(decoder, arms)
                answer_prompts(
                    prompts,
                    arms,
                    decoder,
                    log,
                    temperature=settings["temperature"],
                    coupled=settings["coupled"],
                    seed=settings["seed"],
                    in_turns=settings["concurrency"] == 1,
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
        show_report(report, out)
    if interrupted:
        print("interrupted" + ("" if out is None else ": the same command goes on from here"), file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


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


def _warm_up(decoder: ArmDecoder, arms: Sequence[Arm]) -> None:
    """Pay for first-time work (allocations, kernel selection) outside the measurement."""
    from dspark.decoding.settings import SamplingSettings
    from dspark.evaluation.questions import Conversation, Question

    def hello() -> Conversation:
        message = {"role": "user", "content": "Hello"}
        yield Question(
            prompt_id="warm-up", messages=(message,), sampling=SamplingSettings(temperature=0.0), random=lambda: 0.5
        )

    short = replace(decoder, max_tokens=min(WARM_UP_TOKENS, decoder.max_tokens))
    for arm in arms:
        short(arm, iter([hello()]))

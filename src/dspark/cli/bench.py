"""``dspark bench``: how fast many requests at once are, by load and by policy."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from dspark.cli.options import (
    EMBEDDED,
    MODELS,
    NO_DRAFTER,
    OUTPUT,
    PROMPT,
    SAMPLING,
    BenchmarksOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    LimitOption,
    MaxTokensOption,
    TargetOption,
    TemperatureOption,
)

if TYPE_CHECKING:
    from dspark.cli.models import Models
    from dspark.engine.bench import BenchStep, Cell
    from dspark.engine.profile import StoredProfile
    from dspark.engine.request_stream import StreamPrompt
    from dspark.evaluation.benchmarks import EvaluationPrompt
    from dspark.models.loading import LoadedTarget
    from dspark.scheduling import Policy

RUN = Group("Run", sort_key=4)

REPORT_FILE = "bench.json"

bench = App(name="bench", help="Measure many requests at once: throughput and speed for each user, by load and policy.")


@bench.command
def offline(
    *,
    prompts: Annotated[
        str,
        Parameter(
            group=PROMPT,
            help="What is asked: `builtin` (24 prompts of our own), names of benchmarks, JSONL files, directories of"
            " them; several with commas between. Of a conversation the first turn.",
        ),
    ] = "builtin",
    benchmarks: BenchmarksOption = None,
    limit: LimitOption = None,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    policies: Annotated[
        str,
        Parameter(
            group=MODELS,
            help="What decides how much is drafted and verified: `off`, `fixed:K`, `threshold:C`, `immediate`,"
            " `delayed`; several with commas between.",
        ),
    ] = "off,fixed:3,delayed",
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, Parameter(group=SAMPLING, help="Of everything that is drawn: prompts and samples.")] = 0,
    max_tokens: MaxTokensOption = 128,
    concurrency: Annotated[
        str, Parameter(group=RUN, help="Requests that run at once; several with commas between.")
    ] = "1,2,4,8",
    requests: Annotated[int, Parameter(group=RUN, help="Requests that finish under each policy in a round.")] = 16,
    rounds: Annotated[
        int, Parameter(group=RUN, help="Rounds at each concurrency; in each of them every policy has its turn.")
    ] = 3,
    kv_memory: Annotated[
        float | None,
        Parameter(group=RUN, help="GiB for keys and values of each policy's engine; 1 where the target lets choose."),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(group=OUTPUT, help=f"Directory for {REPORT_FILE}: all numbers, and where they come from."),
    ] = None,
    steps: Annotated[
        Path | None, Parameter(group=OUTPUT, help="JSONL file for the record of every step, as the simulator reads it.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure policies against each other, by how many requests run at once.

    At every concurrency each policy has an engine in which always so many requests run: one that finishes is replaced
    at once. The engines take turns on the same requests, so that what the machine does besides hits all alike. Numbers
    are medians over the rounds; a range is the lowest and the highest of them.

    ```
    dspark bench offline
    dspark bench offline --concurrency 1,8,32 --policies off,fixed:1,fixed:3,fixed:7,delayed --out benches/first
    dspark bench offline --prompts gsm8k,humaneval,mt-bench --benchmarks DIRECTORY --temperature 1 --max-tokens 64
    ```
    """
    from dspark.decoding.settings import SamplingSettings
    from dspark.evaluation.benchmarks import load_prompts

    SamplingSettings(temperature=temperature)
    for name, value in (("--requests", requests), ("--rounds", rounds), ("--max-tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if kv_memory is not None and not 0 < kv_memory < math.inf:
        raise ValueError(f"--kv-memory is {kv_memory:g}; give GiB above 0")
    levels = _concurrencies(concurrency)
    chosen = _policies(policies, drafter)
    asked = load_prompts(prompts, limit=limit, seed=seed, directory=benchmarks)
    settings: dict[str, Any] = {
        "prompts": ",".join(Path(part.strip()).name or part for part in prompts.split(",")),
        "limit": limit,
        "policies": [policy.name for policy in chosen],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": max_tokens,
        "concurrency": levels,
        "requests": requests,
        "rounds": rounds,
        "kv_memory_gib": kv_memory,
    }
    return _offline(
        _open(target, drafter, chosen, dtype=dtype, device=device),
        chosen,
        asked,
        settings,
        out=out,
        steps=steps,
        json=json,
    )


def _offline(
    models: Models,
    policies: Sequence[Policy],
    prompts: Sequence[EvaluationPrompt],
    settings: dict[str, Any],
    *,
    out: Path | None,
    steps: Path | None,
    json: bool,
) -> int:
    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.cli.bench_display import show_bench
    from dspark.cli.calibration_rounds import note
    from dspark.engine.bench import measure_cell
    from dspark.engine.request_stream import RequestStream
    from dspark.evaluation.benchmarks import prompts_digest
    from dspark.files import write_json
    from dspark.training.provenance import provenance

    fitting = fitting_prompts(prompts, models.target, settings["max_tokens"])
    stream = RequestStream(
        fitting,
        temperature=settings["temperature"],
        max_tokens=settings["max_tokens"],
        stop_token_ids=models.target.stop_token_ids,
        seed=settings["seed"],
    )
    kv_memory = settings["kv_memory_gib"]
    kv_memory_bytes = None if kv_memory is None else int(kv_memory * 2**30)
    profile = _profile(models, policies, max(settings["concurrency"]), kv_memory_bytes)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    interrupted = False
    with _step_log(steps) as log:
        try:
            for level in settings["concurrency"]:
                note(f"concurrency {level}")
                cells.append(
                    measure_cell(
                        models.target.model,
                        models.drafter,
                        policies,
                        stream,
                        concurrency=level,
                        requests=settings["requests"],
                        rounds=settings["rounds"],
                        cost=None if profile is None else profile.cost,
                        kv_memory_bytes=kv_memory_bytes,
                        on_step=None if log is None else partial(log, level),
                    )
                )
        except KeyboardInterrupt:
            interrupted = True
    report: dict[str, Any] = {
        "settings": {
            "target": models.target.public_name,
            "target_fingerprint": models.target.model.fingerprint,
            "drafter": drafter_facts(models),
            "dtype": models.target.model.compute_dtype,
            "device": str(models.target.model.device),
            **settings,
            "prompts_digest": prompts_digest(prompts),
            "prompts_left_out": len(prompts) - len(fitting),
        },
        "profile": None if profile is None else {"measured_at": profile.measured_at, "cost": profile.cost.as_dict()},
        "provenance": provenance(),
        "cells": [cell.to_json() for cell in cells],
    }
    if out is not None:
        write_json(out / REPORT_FILE, report)
    if json:
        print(jsonlib.dumps(report))
    else:
        show_bench(report)
        if out is not None:
            print(f"numbers: {out / REPORT_FILE}")
    if interrupted:
        print("interrupted: of the last concurrency nothing is shown", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def _concurrencies(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--concurrency {text} must be numbers with commas between, such as 1,2,4,8") from None
    if min(levels) < 1 or len(set(levels)) < len(levels):
        raise ValueError(f"--concurrency {text}: give numbers of at least 1, each once")
    return levels


def _policies(text: str, drafter: str | None) -> list[Policy]:
    """The policies by name. Raises ValueError where one is unknown, comes twice, or has no drafter."""
    from dspark.scheduling import Off, parse_policy

    try:
        chosen = [parse_policy(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--policies {text}: {error}") from None
    names = [policy.name for policy in chosen]
    if len(set(names)) < len(names):
        raise ValueError(f"--policies {text}: give each policy once")
    if drafter == NO_DRAFTER and any(not isinstance(policy, Off) for policy in chosen):
        raise ValueError(f"--policies {text} need a drafter: leave --drafter none out, or give --policies off")
    return chosen


def _open(target: str, drafter: str | None, policies: Sequence[Policy], *, dtype: str, device: str) -> Models:
    from dspark.cli.models import open_models
    from dspark.scheduling import Off

    drafts = any(not isinstance(policy, Off) for policy in policies)
    models = open_models(target=target, drafter=drafter, speculation=drafts, dtype=dtype, device=device)
    for policy in policies:
        if policy.needs_confidences and models.drafter is not None and not models.drafter.has_confidence_head:
            raise ValueError(
                f"--policies: {policy.name} needs a drafter with a confidence head, and {models.drafter_name} has none:"
                " give off and fixed:K alone"
            )
    return models


def fitting_prompts(prompts: Sequence[EvaluationPrompt], target: LoadedTarget, max_tokens: int) -> list[StreamPrompt]:
    """The first turns that leave room for an answer; says on stderr how many do not."""
    from dspark.cli.calibration_rounds import note
    from dspark.engine.request_stream import StreamPrompt
    from dspark.models.chat import chat_token_ids

    context = target.model.config.max_position_embeddings
    fitting = []
    for prompt in prompts:
        messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        messages.append({"role": "user", "content": prompt.turns[0]})
        prompt_ids = tuple(chat_token_ids(target.tokenizer, messages))
        if len(prompt_ids) + max_tokens <= context:
            fitting.append(StreamPrompt(domain=prompt.domain, prompt_ids=prompt_ids))
    if not fitting:
        raise ValueError(
            f"--max-tokens is {max_tokens}: with it none of {len(prompts)} prompts fits into the target's context of"
            f" {context} tokens"
        )
    if len(fitting) < len(prompts):
        note(f"left out {len(prompts) - len(fitting)} of {len(prompts)} prompts: too long for the target's context")
    return fitting


def _profile(
    models: Models, policies: Sequence[Policy], max_concurrency: int, kv_memory_bytes: int | None
) -> StoredProfile | None:
    """What steps cost here, where a policy asks; measured now if it is not known, which stderr tells."""
    from dspark.engine.loading import known_or_measured
    from dspark.engine.settings import EngineSettings

    if models.drafter is None or not any(policy.needs_cost for policy in policies):
        return None
    settings = EngineSettings(max_concurrency=max_concurrency, kv_memory_bytes=kv_memory_bytes)
    return known_or_measured(models.target, models.drafter, settings)


def drafter_facts(models: Models) -> dict[str, Any] | None:
    """Which drafter it is; None if there is none."""
    from dspark.drafters.calibration_file import drafter_fingerprint
    from dspark.drafters.registry import drafter_kind

    if models.drafter is None:
        return None
    return {
        "name": Path(models.drafter_name).name,
        "kind": drafter_kind(models.drafter.config),
        "block_size": models.drafter.block_size,
        "fingerprint": drafter_fingerprint(models.drafter),
    }


@contextmanager
def _step_log(path: Path | None) -> Iterator[Callable[[int, BenchStep], None] | None]:
    """Writes steps, one a line, each with its concurrency and round."""
    if path is None:
        yield None
        return
    with path.open("w", encoding="utf-8") as file:

        def write(concurrency: int, step: BenchStep) -> None:
            line = {"concurrency": concurrency, "round": step.round, **step.record.as_dict()}
            file.write(jsonlib.dumps(line) + "\n")

        yield write

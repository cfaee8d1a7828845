"""Throughput by how many requests run at once, under every policy, and how much `delayed` verifies: the table and plot.

    python benchmarks/concurrency.py                                     our own prompts
    python benchmarks/concurrency.py --benchmarks DIRECTORY              gsm8k, humaneval and mt-bench as JSONL files

What `dspark bench offline` measures (docs/bench.md), for every temperature and concurrency, with as many requests as
the minutes allow. A cell (temperature, concurrency) that is in OUT is not measured again, so the same command goes on
after an interruption. Writes OUT with provenance and a plot beside it (.svg), and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from provenance import provenance

from dspark.cli.bench import drafter_facts, fitting_prompts
from dspark.cli.models import Models, open_models
from dspark.engine.bench import measure_cell
from dspark.engine.loading import known_or_measured
from dspark.engine.request_stream import RequestStream, StreamPrompt
from dspark.engine.settings import EngineSettings
from dspark.evaluation.benchmarks import load_prompts, prompts_digest
from dspark.evaluation.charts import HEIGHT, STYLE, WIDTH, Chart, Point, Series, svg
from dspark.files import write_json, write_text
from dspark.scheduling import Off, Policy, StepCost, parse_policy

RESULTS = Path(__file__).parent / "results" / "concurrency.json"
POLICIES = "off,fixed:1,fixed:2,fixed:3,fixed:5,fixed:7,immediate,delayed"
LEAST = 0.97
"""`delayed` shall be at least this fast against the best fixed length and against off."""
TEXT_STYLE = "svg { color: #1f2328 } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }"


def main() -> None:
    """Measure what is missing, then write and print all."""
    arguments = parse_arguments()
    policies = [parse_policy(name) for name in arguments.policies.split(",")]
    levels = [int(level) for level in arguments.concurrency.split(",")]
    temperatures = [float(temperature) for temperature in arguments.temperatures.split(",")]
    models, fitting, facts = opened(arguments)
    settings = {
        **facts,
        "policies": [policy.name for policy in policies],
        "max_tokens": arguments.max_tokens,
        "rounds": arguments.rounds,
        "seed": arguments.seed,
    }
    results = read_results(arguments.out, settings)
    done = {(cell["temperature"], cell["concurrency"]) for cell in results["cells"]}
    wanted = [(temperature, level) for temperature in temperatures for level in levels]
    left = [cell for cell in wanted if cell not in done]
    if left:
        cost = measured_cost(models, max(levels))
        results["sessions"].append(provenance())
        seconds = 60 * arguments.minutes * weight(left) / weight(wanted)
    while left:
        began = time.perf_counter()
        temperature, level = left[0]
        share = seconds * weight(left[:1]) / weight(left)
        print(f"temperature {temperature:g}, concurrency {level}: about {share:.0f} s", file=sys.stderr, flush=True)
        cell = measure(models, policies, fitting, cost, arguments, temperature, level, share)
        spent = time.perf_counter() - began
        results["cells"].append({"session": len(results["sessions"]) - 1, "seconds": spent, **cell})
        results["cells"].sort(key=lambda cell: (cell["temperature"], cell["concurrency"]))
        write_json(arguments.out, results, indent=1)
        left, seconds = left[1:], max(seconds - spent, 0.0)
    write_text(arguments.out.with_suffix(".svg"), plot(results))
    print(table(results))


def opened(
    arguments: argparse.Namespace, *, speculation: bool = True
) -> tuple[Models, list[StreamPrompt], dict[str, Any]]:
    """Models, prompts that fit with their answers, and what a result says of both."""
    models = open_models(
        target=arguments.target, drafter=arguments.drafter, speculation=speculation, dtype=arguments.dtype, device="cpu"
    )
    names = "builtin" if arguments.benchmarks is None else "gsm8k,humaneval,mt-bench"
    prompts = load_prompts(names, seed=arguments.seed, directory=arguments.benchmarks)
    facts = {
        "target": models.target.public_name,
        "target_fingerprint": models.target.model.fingerprint,
        "dtype": models.target.model.compute_dtype,
        "drafter": drafter_facts(models),
        "prompts": names,
        "prompts_digest": prompts_digest(prompts),
    }
    return models, fitting_prompts(prompts, models.target, arguments.max_tokens), facts


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=Path, help="directory with gsm8k, humaneval and mt-bench as NAME.jsonl")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", help="directory; by default ours, for the embedded target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=25, help="for the whole grid, loading and profile not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def read_results(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is there already; refuses a file that was measured in another way."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return {"settings": dict(settings), "sessions": [], "cells": []}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if results["settings"] != settings:
        other = [name for name in settings if results["settings"].get(name) != settings[name]]
        sys.exit(f"{path} was measured with another {', '.join(other)}: remove it, or give another --out")
    return results


def measured_cost(models: Models, max_concurrency: int) -> StepCost:
    """The stored profile, measured now if there is none."""
    assert models.drafter is not None, "the models were opened with one"
    return known_or_measured(models.target, models.drafter, EngineSettings(max_concurrency=max_concurrency)).cost


def weight(cells: Sequence[tuple[float, int]]) -> float:
    """Share of the time: many requests at once take longer until all of them run."""
    return sum(1.0 + level / 64 for _, level in cells)


def measure(
    models: Models,
    policies: Sequence[Policy],
    prompts: Sequence[StreamPrompt],
    cost: StepCost,
    arguments: argparse.Namespace,
    temperature: float,
    level: int,
    seconds: float,
) -> dict[str, Any]:
    """One cell, with as many requests as fit into the time by a trial with the target alone."""
    stream = RequestStream(
        prompts,
        temperature=temperature,
        max_tokens=arguments.max_tokens,
        stop_token_ids=models.target.stop_token_ids,
        seed=arguments.seed,
    )
    least = max(3, level // 4)
    began = time.perf_counter()
    trial = measure_cell(
        models.target.model, None, [Off()], stream, concurrency=level, requests=least, rounds=1, cost=None
    )
    (turn,) = trial.turns["off"]
    trial_seconds = time.perf_counter() - began
    to_measure = seconds - trial_seconds - len(policies) * trial.fill_seconds["off"]
    affordable = to_measure / (len(policies) * arguments.rounds) * turn.finished / turn.seconds
    requests = max(least, int(affordable))
    cell = measure_cell(
        models.target.model,
        models.drafter,
        policies,
        stream,
        concurrency=level,
        requests=requests,
        rounds=arguments.rounds,
        cost=cost,
    )
    content = cell.to_json()
    for numbers in content["policies"].values():
        del numbers["rounds"]  # their medians and ranges stay
    return {"temperature": temperature, **content}


def table(results: Mapping[str, Any]) -> str:
    """Markdown: speeds against off, `delayed` against the best fixed length, its verify budget, equal answers."""
    names = [name for name in results["settings"]["policies"] if name != "off"]
    header = ["temperature", "concurrency", "off, tokens/s", *(f"{name} x off" for name in names)]
    header += ["delayed x best fixed", "verified a request", "schedule, share of step", "answers that differ"]
    lines = [header, ["---:"] * len(header)]
    for cell in results["cells"]:
        policies = cell["policies"]
        row = [f"{cell['temperature']:g}", f"{cell['concurrency']}", shown(policies.get("off"), "tokens_per_second")]
        row += [shown(policies[name], "against_off") for name in names]
        delayed = policies.get("delayed")
        row.append("" if delayed is None else with_best(cell, delayed))
        row.append(shown(delayed, "verified"))
        row.append("" if delayed is None else f"{100 * share_of_scheduling(delayed):.2f} %")
        row.append("-" if cell["baseline"] is None else differing(cell))
        lines.append(row)
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + "\n\n" + verdict(results)


def verdict(results: Mapping[str, Any]) -> str:
    """Whether `delayed` keeps up everywhere."""
    below = []
    for cell in results["cells"]:
        numbers = cell["policies"].get("delayed")
        if numbers is None:
            return "`delayed` was not measured"
        for reference in ("against_off", "against_best_fixed"):
            if numbers[reference] is not None and numbers[reference]["median"] < LEAST:
                place = f"temperature {cell['temperature']:g}, concurrency {cell['concurrency']}"
                below.append(f"{place}: {numbers[reference]['median']:.3f} {reference.replace('_', ' ')}")
    if below:
        return f"`delayed` is below {LEAST} at " + "; ".join(below)
    return f"`delayed` is at least {LEAST} of off and of the best fixed length everywhere"


def shown(numbers: Mapping[str, Any] | None, key: str) -> str:
    """A median; empty if there is none."""
    return "" if numbers is None or numbers[key] is None else f"{numbers[key]['median']:.2f}"


def with_best(cell: Mapping[str, Any], delayed: Mapping[str, Any]) -> str:
    """The speed against the best fixed length, and which that is."""
    return f"{shown(delayed, 'against_best_fixed')} ({cell['best_fixed']})" if cell["best_fixed"] else ""


def share_of_scheduling(numbers: Mapping[str, Any]) -> float:
    """Of the time of a step."""
    return numbers["schedule_seconds"]["median"] / numbers["step_seconds"]["median"]


def differing(cell: Mapping[str, Any]) -> str:
    """Answers of all policies that are not the baseline's, of those that were compared."""
    others = [numbers for name, numbers in cell["policies"].items() if name != cell["baseline"]]
    counts = [sum(numbers[f"{kind}_answers"] for numbers in others) for kind in ("differing", "compared")]
    return f"{counts[0]} of {counts[1]}"


def plot(results: Mapping[str, Any]) -> str:
    """A row of two panels for every temperature: speed against off, and what `delayed` verifies."""
    names = [name for name in results["settings"]["policies"] if name != "off"]
    rows = []
    for temperature in sorted({cell["temperature"] for cell in results["cells"]}):
        cells = [cell for cell in results["cells"] if cell["temperature"] == temperature]
        speed = [Series(label=name, points=points(cells, name, "against_off")) for name in names]
        # The same place in the list gives `delayed` the same colour.
        budget = [
            Series(label=name, points=points(cells, name, "verified") if name == "delayed" else ()) for name in names
        ]
        common = {"x_label": "requests at once", "doubling": True}
        rows.append(
            (
                Chart(title=f"speed, T={temperature:g}", y_label="x off", series=tuple(speed), **common),
                Chart(
                    title=f"verify budget of delayed, T={temperature:g}",
                    y_label="draft tokens a request",
                    series=tuple(budget),
                    from_zero=True,
                    **common,
                ),
            )
        )
    return page(rows, names)


def points(cells: Sequence[Mapping[str, Any]], policy: str, key: str) -> tuple[Point, ...]:
    """A policy's medians over concurrency, with the lowest and highest round."""
    found = [(cell["concurrency"], cell["policies"][policy][key]) for cell in cells]
    return tuple(
        Point(x=level, y=spread["median"], interval=(spread["low"], spread["high"]))
        for level, spread in found
        if spread is not None
    )


def page(rows: Sequence[tuple[Chart, Chart]], labels: Sequence[str]) -> str:
    """The panels and their legend as one SVG file."""
    legend_height, gap = 26, 10
    width, height = 2 * WIDTH + gap, legend_height + len(rows) * (HEIGHT + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{TEXT_STYLE}{STYLE}</style>",
    ]
    step = width / max(len(labels), 1)
    for number, label in enumerate(labels):
        x = number * step + gap
        parts.append(f'<path class="line s{number % 7}" d="M{x:.0f} 14H{x + 18:.0f}"/>')
        parts.append(f'<text x="{x + 23:.0f}" y="18">{escape(label)}</text>')
    for row, charts in enumerate(rows):
        for column, chart in enumerate(charts):
            x, y = column * (WIDTH + gap), legend_height + row * (HEIGHT + gap)
            parts.append(f'<g transform="translate({x} {y})">{svg(chart)}</g>')
    return "".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()

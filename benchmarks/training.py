"""Train drafters that differ in one thing, at one budget, and put their held-out numbers side by side.

    python benchmarks/training.py comparison --data DATA --out runs/comparison      the four kinds of drafter
    python benchmarks/training.py ablations --data DATA --out runs/ablations        one default changed at a time

Every run is `dspark train` with a recipe and overrides, in a process of its own, one after another; a run that is
finished is not repeated and one that was stopped goes on. All share one store of teacher states. Writes
OUT/results.json with provenance, and the table in Markdown on stdout.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).parents[1]
COMPARISON = ROOT / "recipes" / "comparison"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A run: what it is called, the recipe in recipes/comparison, and what is changed in it."""

    name: str
    recipe: str = "dspark"
    overrides: tuple[str, ...] = ()


SETS: dict[str, tuple[Variant, ...]] = {
    "comparison": (
        Variant(name="DSpark (Markov head)", recipe="dspark"),
        Variant(name="DFlash", recipe="dflash"),
        Variant(name="Eagle3", recipe="eagle3"),
        Variant(name="MTP-1", recipe="mtp"),
    ),
    "ablations": (
        Variant(name="the defaults"),
        Variant(name="no bigram start", overrides=("bigram.steps=0",)),
        Variant(name="AdamW alone", overrides=("optimiser.muon_learning_rate=0",)),
        Variant(
            name="AdamW alone, rate 0.003",
            overrides=("optimiser.muon_learning_rate=0", "optimiser.learning_rate=0.003"),
        ),
        Variant(name="constant rate after warm-up", overrides=("batch.final_learning_rate_fraction=1",)),
        Variant(name="no warm-up", overrides=("batch.warmup_steps=0",)),
        Variant(name="no decay of slot weights", overrides=("loss.decay=1e9",)),
        Variant(
            name="confidence gradient reaches the backbone", overrides=("loss.confidence_reaches_backbone=true",)
        ),
        Variant(name="cross-entropy alone", overrides=("loss.cross_entropy=1", "loss.total_variation=0")),
        Variant(name="gated head", overrides=("drafter.markov_head=gated",)),
        Variant(name="RNN head", overrides=("drafter.markov_head=rnn",)),
        Variant(name="DFlash", recipe="dflash"),
        Variant(name="DFlash, original layout", recipe="dflash", overrides=("drafter.sample_from_anchor=false",)),
        Variant(name="Eagle3", recipe="eagle3"),
        Variant(
            name="Eagle3 with its own loss",
            recipe="eagle3",
            overrides=("loss.cross_entropy=0", "loss.total_variation=0", "loss.distillation=1", "loss.decay=4.48"),
        ),
    ),
}  # fmt: skip


def main() -> None:
    """Run a set and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=sorted(SETS))
    parser.add_argument("--data", type=Path, action="append", required=True, help="data directory; may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--states", type=Path, help="store of teacher states; default OUT/states")
    parser.add_argument("--only", help="comma-separated places in the set (from 0), to share the work among processes")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, such as batch.steps=150")
    arguments = parser.parse_intermixed_args()
    variants = SETS[arguments.set]
    chosen = range(len(variants)) if arguments.only is None else [int(place) for place in arguments.only.split(",")]
    for place in chosen:
        train(variants[place], arguments)
    finished = [variant for variant in variants if (run_directory(arguments.out, variant) / "result.json").exists()]
    rows = [read_run(variant, arguments.out) for variant in finished]
    results = {"set": arguments.set, "settings": arguments.overrides, "provenance": provenance(), "runs": rows}
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


def train(variant: Variant, arguments: argparse.Namespace) -> None:
    """One run, unless it is there."""
    directory = run_directory(arguments.out, variant)
    if (directory / "result.json").exists():
        return
    command = [sys.executable, "-m", "dspark", "train", str(COMPARISON / f"{variant.recipe}.yaml"), *variant.overrides]
    command += [*arguments.overrides, f"states.directory={arguments.states or arguments.out / 'states'}"]
    command += [word for data in arguments.data for word in ("--data", str(data))]
    command += ["--out", str(directory), "--json"]
    print(f"{variant.name}: {directory}", file=sys.stderr, flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{variant.name} ended with exit code {result.returncode}: {result.stdout.strip()}")
    (directory / "result.json").write_text(result.stdout)


def run_directory(out: Path, variant: Variant) -> Path:
    """Where a variant's run is."""
    return out / re.sub(r"[^a-z0-9.]+", "-", variant.name.lower()).strip("-")


def read_run(variant: Variant, out: Path) -> dict[str, Any]:
    """Cost and last held-out evaluation of a finished run."""
    directory = run_directory(out, variant)
    result = json.loads((directory / "result.json").read_text())
    log = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in log if entry["event"] == "step"]
    last = result["result"]["last"]
    return {
        "name": variant.name,
        "recipe": f"{variant.recipe}.yaml",
        "overrides": list(variant.overrides),
        "steps": result["result"]["steps"],
        "trained_parameters": result["trained_parameters"],
        "block_tokens": sum(step["block_tokens"] for step in steps),
        "minutes": sum(step["seconds"] for step in steps) / 60,
        "sampled": last["sampled"],
        "greedy": last["greedy"],
        "loss": last["loss"],
        "confidence_bce": last["confidence_bce"],
        "held_out_blocks": last["blocks"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: cost, accepted length, and acceptance at each position given all before it are accepted (T = 1)."""
    slots = max((len(row["sampled"]["survival"]) for row in rows), default=0)
    header = ["", "parameters", "block tokens", "minutes", "accepted length T=1", "greedy"]
    header += [f"acceptance at {k}" for k in range(1, slots + 1)]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for row in rows:
        acceptance = [f"{value:.3f}" for value in row["sampled"]["conditional_acceptance"]]
        lines.append(
            [
                row["name"],
                f"{row['trained_parameters'] / 1e6:.1f} M",
                f"{row['block_tokens']:,}",
                f"{row['minutes']:.1f}",
                f"{row['sampled']['value']:.3f}",
                f"{row['greedy']['value']:.3f}",
                *acceptance,
                *[""] * (slots - len(acceptance)),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()

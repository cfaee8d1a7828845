"""What a step of the embedded target costs, by its tokens and types; all in turns in one run.

    python benchmarks/step.py

A step is a forward pass over one request's tokens at a context, and the LM head on each. Writes OUT with provenance and
prints the medians in Markdown, with their ratios to the first type's single token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from provenance import provenance

from dspark import load_target
from dspark.files import write_json
from dspark.models.target import Target
from dspark.types import Segment

RESULTS = Path(__file__).parent / "results" / "step.json"
KINDS = ("int8", "bfloat16", "float32")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; the first is compared with")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128", help="tokens of a step")
    parser.add_argument("--context", type=int, default=256, help="positions before them")
    parser.add_argument("--requests", action="store_true", help="one token of each of so many requests, not of one")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {sorted(unknown)} are not of {KINDS}")
    targets = {kind: load_target("embedded", dtype=kind).model for kind in kinds}
    cells = []
    for tokens in (int(number) for number in arguments.tokens.split(",")):
        steps = {
            kind: make_step(target, tokens, arguments.context, arguments.requests) for kind, target in targets.items()
        }
        cells.append({"tokens": tokens, "step_ms": measure(steps, arguments.rounds)})
    settings = {"context": arguments.context, "requests": arguments.requests, "rounds": arguments.rounds}
    write_json(arguments.out, {"settings": settings, "provenance": provenance(), "cells": cells})
    single = cells[0]["step_ms"][kinds[0]]
    print(f"| tokens | {' | '.join(f'{kind}, ms' for kind in kinds)} |\n|{' ---: |' * (len(kinds) + 1)}")
    for cell in cells:
        times = [f"{value:.1f} ({value / single:.2f})" for value in cell["step_ms"].values()]
        print(f"| {cell['tokens']} | {' | '.join(times)} |")


def make_step(target: Target, tokens: int, context: int, requests: bool) -> Callable[[], object]:
    """A step that can be repeated, after a prompt of ``context`` made-up tokens."""
    slots, length = (tokens, 1) if requests else (1, tokens)
    cache = target.new_cache(slots, context + length)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, target.embedding_weight_VH.shape[0], (context,), generator=generator)
    for slot in range(slots):
        target.forward(prompt, [Segment(slot, 0, context)], cache)
    segments = [Segment(slot, context, length) for slot in range(slots)]
    token_ids = prompt.repeat(-(-tokens // context))[:tokens]

    def step() -> torch.Tensor:
        for slot in range(slots):
            cache.truncate(slot, context)
        logits_MV = target.forward(token_ids, segments, cache, logit_rows=range(tokens)).logits_MV
        assert logits_MV is not None, "they were asked for"
        return logits_MV

    return step


def measure(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, in turns: the first step of a turn waits for the threads of the kind before it."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            step()
            begin = time.perf_counter()
            step()
            times[kind].append(1000.0 * (time.perf_counter() - begin))
    return {kind: median(values) for kind, values in times.items()}


if __name__ == "__main__":
    main()

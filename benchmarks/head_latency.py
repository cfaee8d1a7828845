"""What the sequential head adds to a round: the shipped drafter with its heads and without, in the same engine.

    OMP_NUM_THREADS=1 python benchmarks/head_latency.py

Without its sequential and confidence heads a DSpark drafter is a DFlash drafter. Both get the same made-up load, in
turns, with every draft verified to its end. Seconds are those of the processor, so that other work on the machine
counts little. Writes OUT with provenance and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import provenance

from dspark import load_drafter, load_target
from dspark.drafters.dspark import DSparkDrafter
from dspark.engine.made_up_load import MadeUpLoad
from dspark.files import write_json

RESULTS = Path(__file__).parent / "results" / "head-latency.json"
CONTEXT, ROOM = 256, 512
DRAFT_LENGTHS = (1, 3, 5, 7)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,16", help="requests at once")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if torch.get_num_threads() != 1:
        parser.error("processor seconds are those of one thread: set OMP_NUM_THREADS=1")

    target = load_target("embedded").model
    dspark = load_drafter("embedded", target)
    assert isinstance(dspark, DSparkDrafter)
    drafters = {"DSpark": dspark, "without heads": without_heads(dspark)}
    cells = []
    for requests in (int(number) for number in arguments.requests.split(",")):
        loads = {}
        for name, drafter in drafters.items():
            loads[name] = MadeUpLoad(
                target,
                drafter,
                max_requests=requests,
                max_context=CONTEXT,
                room=ROOM,
                max_chunk=CONTEXT,
                kv_memory_bytes=None,
                clock=time.process_time,
            )
            loads[name].fill(requests, CONTEXT)
        cells += [measure(loads, requests, length, arguments.rounds) for length in DRAFT_LENGTHS]
    settings = {"context": CONTEXT, "rounds": arguments.rounds, "dtype": target.compute_dtype}
    write_json(arguments.out, {"settings": settings, "provenance": provenance(), "cells": cells})
    print("| requests | draft tokens | draft, ms | without heads, ms | whole round, ms | heads add to a round |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for cell in cells:
        print(
            f"| {cell['requests']} | {cell['draft_tokens']} | {cell['draft_ms']['DSpark']:.2f}"
            f" | {cell['draft_ms']['without heads']:.2f} | {cell['round_ms']:.1f} | {cell['added_share']:.1%} |"
        )


def without_heads(drafter: DSparkDrafter) -> DSparkDrafter:
    """The same backbone as a DFlash drafter."""
    config = replace(
        drafter.config,
        markov_rank=0,
        markov_head_type=None,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    bare = DSparkDrafter(config)
    names = set(bare.state_dict())
    bare.load_state_dict({name: value for name, value in drafter.state_dict().items() if name in names}, assign=True)
    return bare.to(drafter.dtype).eval()


def measure(loads: dict[str, MadeUpLoad], requests: int, draft_length: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds that take turns; the share is the heads' milliseconds by those of a round without them."""
    draft: dict[str, list[float]] = {name: [] for name in loads}
    whole: list[float] = []
    for _ in range(rounds):
        for name, load in loads.items():
            seconds = load.step(draft_length=draft_length, verified=requests * draft_length).seconds
            draft[name].append(1000.0 * seconds.draft)
            whole.append(1000.0 * (seconds.schedule + seconds.verify))
    draft_ms = {name: median(values) for name, values in draft.items()}
    rest_ms = median(whole)
    return {
        "requests": requests,
        "draft_tokens": draft_length,
        "draft_ms": draft_ms,
        "round_ms": draft_ms["DSpark"] + rest_ms,
        "added_share": (draft_ms["DSpark"] - draft_ms["without heads"]) / (draft_ms["without heads"] + rest_ms),
    }


if __name__ == "__main__":
    main()

"""What choosing the lengths costs: `delayed` and `immediate` on made-up batches, beside one decoding step.

    python benchmarks/scheduling.py

Per batch the median time of a whole decision (plan before drafting, lengths after it), and the median one-token step of
the embedded target in the same process, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from provenance import provenance

from dspark.models.loading import load_target
from dspark.scheduling import (
    Delayed,
    Drafts,
    History,
    Immediate,
    MeasuredCurve,
    Policy,
    StepBatch,
    StepCost,
)
from dspark.types import Segment

COST = StepCost(
    verify=MeasuredCurve(sizes=(1, 8, 16, 32, 512), seconds=(0.02, 0.024, 0.03, 0.037, 0.4)),
    seconds_per_context_token=1e-6,
    seconds_per_attended_token=1e-6,
    draft={
        1: MeasuredCurve(sizes=(1, 64), seconds=(0.005, 0.02)),
        16: MeasuredCurve(sizes=(1, 64), seconds=(0.01, 0.05)),
    },
    prefill=MeasuredCurve(sizes=(1, 256), seconds=(0.001, 0.1)),
)


def drafts(step: int, requests: int, positions: int, generator: np.random.Generator) -> Drafts:
    """Confidences of a full batch."""
    return Drafts(
        step=step,
        request_ids_R=np.arange(requests),
        lengths_R=np.full(requests, positions),
        confidences_RG=generator.uniform(0.2, 1.0, (requests, positions)),
    )


def decide(policy: Policy, requests: int, positions: int, generator: np.random.Generator) -> float:
    """Seconds of one decision, with survivals of two steps ago at hand."""
    history = (
        History().after(drafts(0, requests, positions, generator)).after(drafts(1, requests, positions, generator))
    )
    made = drafts(2, requests, positions, generator)
    began = time.perf_counter()
    batch = StepBatch(
        step=2,
        request_ids_R=np.arange(requests),
        draftable_R=np.full(requests, positions),
        context_tokens=300 * requests,
    )
    plan = policy.plan(batch, history.past, COST)
    if plan.drafts:
        policy.verify_lengths(plan, made, COST)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    target = load_target("embedded").model
    cache = target.new_cache(1, 320)
    target.forward(torch.zeros(256, dtype=torch.long), [Segment(0, 0, 256)], cache)

    def step() -> float:
        began = time.perf_counter()
        target.logits(target.forward(torch.zeros(1, dtype=torch.long), [Segment(0, 256, 1)], cache).hidden_NH).argmax()
        seconds = time.perf_counter() - began
        cache.truncate(0, 256)
        return seconds

    generator = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        seconds.setdefault("one-token step of the embedded target, context 256", []).append(step())
        for policy in (Delayed(), Immediate()):
            for requests, positions in ((64, 7), (512, 16)):
                name = f"{policy.name}, {requests} requests x {positions} positions"
                seconds.setdefault(name, []).append(decide(policy, requests, positions, generator))
    result = {
        "provenance": provenance(),
        "milliseconds": {name: round(1e3 * statistics.median(values), 3) for name, values in seconds.items()},
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

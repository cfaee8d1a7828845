"""How far number formats of a target are from float32: next-token distributions over answers that none was fitted on.

    python benchmarks/quantisation.py                                     our own prompts
    python benchmarks/quantisation.py --benchmarks DIRECTORY              gsm8k, humaneval and mt-bench as JSONL files

The target answers the prompts, at temperature 1 with a seed each, in the first of the formats. For each token of the
answers it is then computed how the distribution that a format gives for it differs from that of the same target in
float32. Says nothing of speed. Writes OUT with provenance and prints a table in Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from concurrency import opened
from identity import answered, by_turns, requests_of
from provenance import provenance

from dspark import load_target
from dspark.evaluation.statistics import Ratio, Resampling
from dspark.files import write_json
from dspark.models.target import Target
from dspark.types import Segment

RESULTS = Path(__file__).parent / "results" / "quantisation.json"


def main() -> None:
    """Answer, compare, write, print."""
    arguments = parse_arguments()
    dtypes = arguments.dtypes.split(",")
    arguments.dtype, arguments.drafter = dtypes[0], None
    models, fitting, facts = opened(arguments, speculation=False)
    requests = requests_of(by_turns(fitting)[: arguments.prompts], models, arguments)
    answers = answered(models, requests, "off", min(32, len(requests)), None, with_drafter=False)
    texts = [(list(request.prompt_ids), list(answer)) for request, answer in zip(requests, answers, strict=True)]
    others = {dtype: load_target(arguments.target, dtype=dtype).model for dtype in dtypes[1:]}
    exact = load_target(arguments.target, dtype="float32").model
    cells = compared({dtypes[0]: models.target.model, **others}, exact, texts)
    settings = {
        **facts,
        "requests": len(requests),
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
    }
    write_json(arguments.out, {"settings": settings, "provenance": provenance(), "cells": cells})
    print(
        "| number format | tokens | KL divergence from float32, mean | same most likely token |\n|---|---:|---:|---:|"
    )
    for cell in cells:
        low, high = (f"{value:.4f}" for value in cell["kl_divergence"]["interval"])
        same = ", ".join(f"{100 * value:.1f}" for value in cell["agreement"]["interval"])
        print(
            f"| {cell['dtype']} | {cell['tokens']:,} | {cell['kl_divergence']['value']:.4f} [{low}, {high}] "
            f"| {100 * cell['agreement']['value']:.1f} % [{same}] |"
        )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", type=Path, help="directory with gsm8k, humaneval and mt-bench as NAME.jsonl")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--dtypes", default="int8,bfloat16")
    parser.add_argument("--prompts", type=int, default=60, help="of the domains by turns")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.set_defaults(seeded=True)
    return parser.parse_args()


def compared(
    targets: Mapping[str, Target], exact: Target, texts: Sequence[tuple[list[int], list[int]]]
) -> list[dict[str, Any]]:
    """Mean KL divergence (nats a token) of each target from ``exact``, and how often they name the same token first."""
    divergences, agreements = ({dtype: [0.0] * len(texts) for dtype in targets} for _ in range(2))
    for number, (prompt_ids, answer_ids) in enumerate(texts):
        log_p_LV = log_probabilities(exact, prompt_ids, answer_ids)
        for dtype, target in targets.items():
            log_q_LV = log_probabilities(target, prompt_ids, answer_ids)
            divergences[dtype][number] = float((log_p_LV.exp() * (log_p_LV - log_q_LV)).sum())
            agreements[dtype][number] = float((log_p_LV.argmax(-1) == log_q_LV.argmax(-1)).sum())
    resampling, tokens = Resampling(len(texts), seed=0), [float(len(answer_ids)) for _, answer_ids in texts]
    cells: list[dict[str, Any]] = []
    for dtype in targets:
        cell: dict[str, Any] = {"dtype": dtype, "tokens": int(sum(tokens))}
        for name, sums in (("kl_divergence", divergences[dtype]), ("agreement", agreements[dtype])):
            estimate = resampling.ratio(Ratio(numerators_P=sums, denominators_P=tokens))
            assert estimate is not None, "there are tokens"
            cell[name] = estimate.to_json()
        cells.append(cell)
    return cells


def log_probabilities(target: Target, prompt_ids: list[int], answer_ids: list[int]) -> torch.Tensor:
    """float64 ``[L, V]`` of the answer's tokens, each after what is before it."""
    token_ids = torch.tensor(prompt_ids + answer_ids[:-1])
    cache = target.new_cache(1, len(token_ids))
    rows = range(len(prompt_ids) - 1, len(token_ids))
    logits_LV = target.forward(token_ids, [Segment(0, 0, len(token_ids))], cache, logit_rows=rows).logits_MV
    assert logits_LV is not None, "they were asked for"
    return logits_LV.double().log_softmax(-1)


if __name__ == "__main__":
    main()

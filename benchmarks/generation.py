"""Decode benchmark prompts with the drafter: accepted length by domain, speed and identity against no speculation.

    python benchmarks/generation.py --prompts DIRECTORY --out results.json --temperature 0 --baseline

DIRECTORY holds JSONL files of {"turns": [...]} named as below; the first turn of each prompt is asked through the
chat template. Every answer is appended to OUT's neighbour ``.rows.jsonl`` as it ends, so a run that stopped goes on.
Counts are pooled over all rounds of all prompts of a domain; ``macro`` is the mean over domains.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provenance import provenance
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dspark.cli.models import open_models
from dspark.cli.prompts import chat_token_ids
from dspark.decoding import SamplingSettings
from dspark.engine.generation import generate
from dspark.engine.result import GenerationResult

DOMAINS = {
    "math": ("gsm8k", "math500", "aime25"),
    "code": ("humaneval", "mbpp", "livecodebench"),
    "chat": ("mt-bench", "arena-hard-v2"),
}


def domain_prompts(directory: Path, names: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """The first ``count`` prompts, taken from the domain's files in turn: (name/line, text)."""

    def lines(name: str) -> Iterator[tuple[str, str]]:
        with (directory / f"{name}.jsonl").open() as file:
            for number, line in enumerate(file):
                yield f"{name}/{number}", json.loads(line)["turns"][0]

    rounds = itertools.zip_longest(*(lines(name) for name in names))
    return [prompt for turn in rounds for prompt in turn if prompt is not None][:count]


def pooled(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of many answers taken together."""
    total = {key: sum(r[key] for r in results) for key in ("rounds", "drafted", "verified", "accepted", "seconds")}
    tokens = sum(len(r["token_ids"]) for r in results)
    decode_seconds = sum(r["seconds"] - r["prefill_seconds"] for r in results)
    by_position = {
        name: [sum(column) for column in zip(*(r[f"{name}_per_position"] for r in results), strict=True)]
        for name in ("accepted", "reached", "verified")
    }
    return {
        "answers": len(results),
        "tokens": tokens,
        **total,
        "accepted_length": (tokens - len(results)) / total["rounds"] if total["rounds"] else None,
        "verified_token_acceptance": total["accepted"] / total["verified"] if total["verified"] else None,
        "conditional_acceptance": [
            round(a / r, 4) if r else None for a, r in zip(by_position["accepted"], by_position["reached"], strict=True)
        ],
        "prefix_survival": [
            round(a / v, 4) if v else None
            for a, v in zip(by_position["accepted"], by_position["verified"], strict=True)
        ],
        "decode_tokens_per_second": (tokens - len(results)) / decode_seconds,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    domains = {}
    for domain in DOMAINS:
        chosen = [row for row in rows if row["domain"] == domain]
        if not chosen:
            continue
        domains[domain] = pooled([row["dspark"] for row in chosen])
        compared = [row for row in chosen if row.get("plain")]
        if compared:
            plain, ours = pooled([row["plain"] for row in compared]), pooled([row["dspark"] for row in compared])
            domains[domain]["plain_tokens_per_second"] = plain["decode_tokens_per_second"]
            domains[domain]["speed_up"] = ours["decode_tokens_per_second"] / plain["decode_tokens_per_second"]
            domains[domain]["identical"] = sum(
                row["plain"]["token_ids"] == row["dspark"]["token_ids"] for row in compared
            )
    macro = {}
    for key in ("accepted_length", "speed_up"):
        values = [d[key] for d in domains.values() if key in d]
        if values:
            macro[key] = sum(values) / len(values)
    return {"domains": domains, "macro": macro, "pooled": pooled([row["dspark"] for row in rows])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=50, help="prompts a domain")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=None, help="seeded coupling instead of the p/q rule")
    parser.add_argument("--baseline", action="store_true", help="also decode without speculation, prompt by prompt")
    arguments = parser.parse_args()

    models = open_models(
        target=arguments.target,
        drafter=arguments.drafter,
        speculation=True,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    target, tokenizer = models.target, models.target.tokenizer
    settings = SamplingSettings(temperature=arguments.temperature, seed=arguments.seed)

    def answer(drafter: Any, prompt: str) -> GenerationResult:
        ids = chat_token_ids(tokenizer, [{"role": "user", "content": prompt}])
        *_, last = generate(
            target.model,
            drafter,
            ids,
            settings,
            max_tokens=arguments.max_tokens,
            stop_token_ids=target.stop_token_ids,
        )
        assert last.result is not None
        return last.result

    work = [
        (domain, name, prompt)
        for domain, names in DOMAINS.items()
        for name, prompt in domain_prompts(arguments.prompts, names, arguments.count)
    ]
    rows_path = arguments.out.with_suffix(".rows.jsonl")
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()] if rows_path.exists() else []
    done = {row["prompt"] for row in rows}
    console = Console(stderr=True)
    with rows_path.open("a") as file:
        for domain, name, prompt in track(work, console=console):
            if name in done:
                continue
            row = {"domain": domain, "prompt": name, "dspark": answer(models.drafter, prompt).to_json()}
            if arguments.baseline:
                row["plain"] = answer(None, prompt).to_json()
            rows.append(json.loads(json.dumps(row)))
            file.write(json.dumps(row) + "\n")
            file.flush()
    settings_used = {key: value.name if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    result = {"settings": settings_used, **summary(rows), "provenance": provenance()}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    table = Table(
        "domain", "answers", "accepted length", "acceptance by position", "tok/s", "plain", "speed-up", "identical"
    )
    for domain, d in result["domains"].items():
        table.add_row(
            domain,
            str(d["answers"]),
            f"{d['accepted_length']:.3f}",
            " ".join("-" if c is None else f"{c:.2f}" for c in d["conditional_acceptance"]),
            f"{d['decode_tokens_per_second']:.1f}",
            f"{d.get('plain_tokens_per_second', 0):.1f}",
            f"{d.get('speed_up', 0):.2f}",
            str(d.get("identical", "-")),
        )
    Console().print(table)
    Console().print(f"macro over domains: {result['macro']}")


if __name__ == "__main__":
    main()

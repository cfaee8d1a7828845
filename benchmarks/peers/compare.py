"""All peers side by side: the same weights, prompts, lengths and threads, by turns in one run.

    python benchmarks/peers/prepare.py                        once: builds llama.cpp, installs vLLM
    python benchmarks/peers/compare.py                        our own prompts
    python benchmarks/peers/compare.py --prompts gsm8k.jsonl,humaneval.jsonl,mt-bench.jsonl
    python benchmarks/peers/compare.py --table                the tables of the last run, nothing is measured

Every peer is a process that is started once. In each round every peer does every cell (one request at a time for each
domain, and more at once of all domains), each round in another order; then single steps are timed. OUT is written
after each round, with provenance, and the tables are printed at the end in Markdown. See docs/peers.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prepare import default_environments, facts, gguf, vllm_python
from processes import Process
from tables import tables
from workload import Cell, Workload, digest, lasting, tokenized

from dspark.evaluation.benchmarks import load_prompts
from dspark.files import write_json
from dspark.models.loading import find_checkpoint

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from provenance import provenance  # noqa: E402  (of all benchmarks)

RESULTS = HERE.parent / "results" / "peers.json"
REFERENCE = "dspark-off"
"""Chooses the prompts, and the others' answers are compared with its own."""
PEERS = (
    REFERENCE,
    "dspark-delayed",
    "llama.cpp-q8_0",
    "llama.cpp-bf16",
    "vllm",
    "transformers",
    "transformers-lookup",
)
MORE_PEERS = ("vllm-float32", "transformers-float32", "llama.cpp-q8_0-ngram", "llama.cpp-bf16-ngram")
LOOKUP_TOKENS = 10
WARM_UP_TOKENS = 8
STEP_COUNTS = (1, 4, 8, 16, 32)
STEP_CONTEXT = 256


def main() -> None:
    """Start, measure, write, print."""
    arguments = parse_arguments()
    if arguments.table:
        print(tables(json.loads(arguments.out.read_text(encoding="utf-8"))))
        return
    levels = [int(level) for level in arguments.levels.split(",")]
    checkpoint = find_checkpoint(arguments.target)
    if not checkpoint.is_dir():
        sys.exit(f"--target {arguments.target} is a file: give a checkpoint's directory, which all peers can read")
    asked, stop_token_ids = tokenized(
        load_prompts(arguments.prompts, limit=arguments.limit, directory=arguments.benchmarks), checkpoint
    )
    longest = max(len(prompt.token_ids) for prompt in asked) + arguments.tokens + 1
    logs = arguments.environments / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        peers: dict[str, Process] = {}
        for name, command in commands(arguments, checkpoint, max(levels), longest).items():
            say(f"starting {name}")
            process = Process(name, command, {"OMP_NUM_THREADS": str(arguments.threads)}, logs / f"{name}.log")
            peers[name] = stack.enter_context(process)
        answers = peers[REFERENCE].ask(
            "generate",
            prompts=[prompt.token_ids for prompt in asked],
            tokens=arguments.tokens,
            concurrency=max(levels),
        )["answers"]
        chosen = lasting(asked, answers, stop_token_ids)
        workload = Workload(chosen)
        if set(workload.domains) != {prompt.domain for prompt in asked}:
            sys.exit(f"of a domain no answer has {arguments.tokens} tokens: give more prompts, or fewer --tokens")
        results: dict[str, Any] = {
            "settings": {
                "target": arguments.target if arguments.target == "embedded" else checkpoint.name,
                "prompts": [Path(part).name for part in arguments.prompts.split(",")],
                "prompts_digest": digest(chosen),
                "prompts_per_domain": {
                    domain: sum(prompt.domain == domain for prompt in chosen) for domain in workload.domains
                },
                "prompts_left_out": len(asked) - len(chosen),
                "mean_prompt_tokens": sum(len(prompt.token_ids) for prompt in chosen) / len(chosen),
                "tokens": arguments.tokens,
                "waves": arguments.waves,
                "threads": arguments.threads,
                "step_context": STEP_CONTEXT,
            },
            "provenance": {**provenance(), "processor_flags": processor_flags()},
            "peers": {
                name: {
                    **peer.facts,
                    "command": [Path(word).name for word in peer.command],
                    "environment": environment(name, arguments.environments),
                }
                for name, peer in peers.items()
            },
            "rounds": [],
        }
        cells = workload.cells(levels)
        for name, peer in peers.items():
            say(f"warming up {name}")
            for level in filter(partial(can, name), levels):
                some = workload.prompts(Cell(concurrency=level, domain=workload.domains[0]), 0, level)
                peer.ask("generate", prompts=some, tokens=WARM_UP_TOKENS, concurrency=level)
        for number in range(arguments.rounds):
            began = time.perf_counter()
            results["rounds"].append(one_round(peers, cells, workload, number, arguments))
            write_json(arguments.out, results, indent=1)
            say(f"round {number + 1} of {arguments.rounds}: {time.perf_counter() - began:.0f} s")
    print(tables(results))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=default_environments(), help="what prepare.py made")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"with commas between; also {', '.join(MORE_PEERS)}")
    parser.add_argument("--prompts", default="builtin", help="as in `dspark bench offline`: JSONL files, benchmarks")
    parser.add_argument("--benchmarks", type=Path, help="directory with benchmarks as NAME.jsonl")
    parser.add_argument("--limit", type=int, default=24, help="prompts of a benchmark at most")
    parser.add_argument("--target", default="embedded", help="or a checkpoint's directory")
    parser.add_argument("--drafter", help="directory; by default ours, for the embedded target")
    parser.add_argument("--levels", default="1,4,8,32", help="requests at once")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each prompt")
    parser.add_argument("--waves", type=int, default=2, help="requests of a cell in a round: so many times its level")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-steps", action="store_true", help="leave single steps out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the tables of OUT and measure nothing")
    return parser.parse_args()


def commands(
    arguments: argparse.Namespace, checkpoint: Path, max_concurrency: int, max_length: int
) -> dict[str, list[str]]:
    """How each peer is started, the reference first."""
    names = arguments.peers.split(",")
    if unknown := sorted(set(names) - {*PEERS, *MORE_PEERS}):
        sys.exit(f"--peers {', '.join(unknown)} are not known: {', '.join((*PEERS, *MORE_PEERS))}")
    threads = ["--threads", str(arguments.threads)]
    sizes = ["--max-concurrency", str(max_concurrency), "--max-length", str(max_length), *threads]
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys((REFERENCE, *names)):
        kind, _, variant = name.partition("-")
        float32 = ["--dtype", "float32"] if variant == "float32" else []
        if kind == "dspark":
            drafter = [] if arguments.drafter is None else ["--drafter", arguments.drafter]
            options = ["--target", arguments.target, "--policy", variant, *drafter, *sizes]
            found[name] = [sys.executable, str(HERE / "peer_dspark.py"), *options]
        elif kind == "llama.cpp":
            directory = arguments.environments / kind
            facts(directory)
            form, _, speculation = variant.partition("-")
            model = gguf(checkpoint, form, directory)
            programs = ["--programs", str(directory / "build" / "bin"), "--model", str(model)]
            speculative = ["--speculation", "ngram-simple"] if speculation else []
            found[name] = [sys.executable, str(HERE / "peer_llama_cpp.py"), *programs, *speculative, *sizes]
        elif kind == "vllm":
            directory = arguments.environments / kind
            facts(directory)
            options = ["--model", str(checkpoint), *float32, *sizes]
            found[name] = [str(vllm_python(directory)), str(HERE / "peer_vllm.py"), *options]
        else:
            lookup = ["--lookup", str(LOOKUP_TOKENS)] if variant == "lookup" else []
            options = ["--model", str(checkpoint), *lookup, *float32, *threads]
            found[name] = [sys.executable, str(HERE / "peer_transformers.py"), *options]
    return found


def environment(name: str, environments: Path) -> dict[str, Any] | None:
    """How the peer's environment was made; None where it is this one."""
    kind = name.partition("-")[0]
    return facts(environments / kind) if kind in ("llama.cpp", "vllm") else None


def can(peer: str, concurrency: int) -> bool:
    """Whether the peer takes so many requests: prompt lookup takes one."""
    return concurrency == 1 or peer != "transformers-lookup"


def one_round(
    peers: Mapping[str, Process],
    cells: Sequence[Cell],
    workload: Workload,
    number: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Every cell of every peer, and its steps."""
    names = list(peers)
    order = names[number % len(names) :] + names[: number % len(names)]
    content: dict[str, Any] = {"order": order, "cells": {}, "steps": {}, "idle_cpu_share": {}, "resident_bytes": {}}
    spent, waited = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)

    def watched(name: str, seconds: float, before: Mapping[str, float]) -> None:
        for other in names:
            if other != name:
                spent[other] += peers[other].cpu_seconds() - before[other]
                waited[other] += seconds

    for cell in cells:
        answers: dict[str, list[dict[str, Any]]] = {}
        content["cells"][cell.name] = {"concurrency": cell.concurrency, "domain": cell.domain, "peers": {}}
        for name in order:
            if can(name, cell.concurrency):
                before = {other: peers[other].cpu_seconds() for other in names}
                turn = measure(peers[name], cell, workload, number, arguments)
                watched(name, turn["seconds"], before)
                answers[name] = turn.pop("answers")
                content["cells"][cell.name]["peers"][name] = turn
        for name, own in answers.items():
            content["cells"][cell.name]["peers"][name]["agreement"] = agreement(own, answers[REFERENCE])
    for name in order:
        if not arguments.no_steps and (name == REFERENCE or name in ("llama.cpp-q8_0", "llama.cpp-bf16")):
            content["steps"][name] = peers[name].ask("step_ms", context=STEP_CONTEXT, counts=STEP_COUNTS, steps=16)
    for name, peer in peers.items():
        content["idle_cpu_share"][name] = spent[name] / waited[name] if waited[name] else 0.0
        content["resident_bytes"][name] = peer.resident_bytes()
    return content


def measure(
    peer: Process, cell: Cell, workload: Workload, number: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """One turn: seconds, tokens, the median speed of a request after its first token, and the answers."""
    prompts = workload.prompts(cell, number, arguments.waves * cell.concurrency)
    result = peer.ask("generate", prompts=prompts, tokens=arguments.tokens, concurrency=cell.concurrency)
    answers = result["answers"]
    if short := [len(answer["token_ids"]) for answer in answers if len(answer["token_ids"]) != arguments.tokens]:
        raise RuntimeError(f"{peer.name} gave answers of {short} tokens where {arguments.tokens} were asked for")
    speeds = sorted((arguments.tokens - 1) / answer["decode_seconds"] for answer in answers if answer["decode_seconds"])
    return {
        "seconds": result["seconds"],
        "tokens": arguments.tokens * len(answers),
        "user_tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "answers": answers,
    }


def agreement(answers: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> float:
    """Share of the answers' tokens before they part from the reference's."""
    same = total = 0
    for answer, other in zip(answers, reference, strict=True):
        pairs = list(zip(answer["token_ids"], other["token_ids"], strict=True))
        same += next((place for place, (own, its) in enumerate(pairs) if own != its), len(pairs))
        total += len(pairs)
    return same / total


def processor_flags() -> list[str]:
    """What the processor can do, as Linux lists it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return line.partition(":")[2].split()
    return []


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""The engine under trouble for a long time: mixed load, random cancellations, too little memory.

    python benchmarks/soak.py --minutes 20 --prompts gsm8k.jsonl,humaneval.jsonl,mt-bench.jsonl

A catalogue of greedy and seeded requests is answered one at a time by plain decoding first. Then clients submit
requests of the catalogue at random, several at once, some of them cancelled at a random moment. Every answer must be
the one that the request got alone (a cancelled one its beginning), all memory must come back, and the process must not
grow.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from provenance import provenance

from dspark.cli.prompts import read_prompts
from dspark.decoding import SamplingSettings
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.core import EngineCore
from dspark.engine.engine import Engine
from dspark.engine.loading import known_or_measured
from dspark.engine.request import Completion, Request
from dspark.engine.settings import EngineSettings
from dspark.models.chat import chat_token_ids
from dspark.models.loading import LoadedTarget, load_target
from dspark.scheduling import Off, parse_policy


def catalogue(target: LoadedTarget, paths: list[Path], count: int, seed: int) -> list[Request]:
    """Requests of all kinds; long prompts are several questions in one."""
    draw = random.Random(seed)
    questions = [prompt.turns[0] for path in paths for prompt in read_prompts(path)]
    requests = []
    for _ in range(count):
        text = "\n\n".join(draw.sample(questions, draw.choice([1, 1, 1, 1, 2, 3])))
        if draw.random() < 0.3:
            text = "Answer in one paragraph, and be friendly to whoever asks.\n\n" + text
        sampling = SamplingSettings(
            temperature=draw.choice([0.0, 0.0, 0.7, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.1]),
            seed=draw.randrange(10**6),
        )
        requests.append(
            Request(
                prompt_ids=tuple(chat_token_ids(target.tokenizer, [{"role": "user", "content": text}])[-700:]),
                sampling=sampling,
                max_tokens=draw.choice([8, 32, 64, 96]),
                stop_token_ids=target.stop_token_ids,
                n=draw.choice([1, 1, 1, 1, 2]),
                logprobs=draw.choice([None, None, 0, 3]),
                max_draft_tokens=draw.choice([None, None, None, 0, 2]),
                user=draw.choice(["ann", "bob", "eve"]),
            )
        )
    return requests


def alone(target: LoadedTarget, requests: list[Request]) -> list[tuple[Completion, ...]]:
    """Each request's answers by plain decoding, one after the other, nothing reused."""
    answers = []
    for number, request in enumerate(requests):
        settings = EngineSettings(max_concurrency=1, reuse_prefixes=False, kv_memory_bytes=2**27)
        core = EngineCore(target.model, None, policy=Off(), settings=settings, tokenizer=target.tokenizer)
        handle = core.submit(replace(request, logprobs=None))
        core.run()
        assert handle.result is not None
        answers.append(handle.result.completions)
        if number % 20 == 19:
            print(f"alone: {number + 1} of {len(requests)}", flush=True)
    return answers


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process now, by its id."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The options of a soak."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSONL files of conversations, with commas between")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=120, help="size of the catalogue")
    parser.add_argument("--clients", type=int, default=24, help="requests at once")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--memory-mib", type=int, default=120, help="of keys and values: less than the load wants")
    parser.add_argument("--policy", default="delayed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run_clients(
    client: Callable[[int], None], count: int, process: int | str, seen: Counter[str], wrong: list[dict[str, Any]]
) -> list[dict[str, float]]:
    """Run ``client(number)`` in ``count`` threads, and print ``seen`` and ``wrong`` every minute until all have ended.

    Returns:
        The memory of ``process`` (:func:`resident_bytes`) every five seconds.
    """
    memory: list[dict[str, float]] = []
    began = time.monotonic()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(5.0)
        mib = resident_bytes(process) / 2**20
        memory.append({"seconds": round(time.monotonic() - began, 1), "mib": round(mib, 1)})
        if len(memory) % 12 == 0:
            print(f"{memory[-1]} {dict(seen)} wrong: {len(wrong)}", flush=True)
    return memory


def growth(memory: list[dict[str, float]]) -> dict[str, Any]:
    """What a result says of memory: means of its second and last quarter, and all of it."""
    quarter = max(len(memory) // 4, 1)
    early = sum(point["mib"] for point in memory[quarter : 2 * quarter]) / quarter
    late = sum(point["mib"] for point in memory[-quarter:]) / quarter
    return {
        "resident MiB": {
            "second quarter": round(early, 1),
            "last quarter": round(late, 1),
            "ratio": round(late / early, 4) if early else None,
        },
        "resident": memory,
    }


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Write a result if it has a place, and print it without the memory over time."""
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "resident"}, indent=1))


def main() -> None:
    arguments = parse_arguments(__doc__)

    target = load_target("embedded", dtype="int8")
    drafter = load_drafter("embedded", target.model)
    requests = catalogue(
        target, [Path(path) for path in arguments.prompts.split(",")], arguments.requests, arguments.seed
    )
    expected = alone(target, requests)

    settings = EngineSettings(max_concurrency=arguments.concurrency, kv_memory_bytes=arguments.memory_mib * 2**20)
    policy = parse_policy(arguments.policy)
    cost = known_or_measured(target, drafter, settings).cost if policy.needs_cost else None
    seen: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    lock = threading.Lock()
    with Engine(target, drafter, policy=policy, cost=cost, settings=settings) as engine:
        end = time.monotonic() + 60.0 * arguments.minutes

        def client(number: int) -> None:
            draw = random.Random(1000 * arguments.seed + number)
            while time.monotonic() < end:
                index = draw.randrange(len(requests))
                generation = engine.submit_request(requests[index])
                if draw.random() < 0.25:
                    time.sleep(draw.uniform(0.0, 4.0))
                    generation.cancel()
                result = generation.result()
                streamed = [()] * requests[index].n
                for delta in generation.deltas():
                    streamed[delta.choice] += delta.token_ids
                for choice, (completion, whole) in enumerate(zip(result.completions, expected[index], strict=True)):
                    is_cut = completion.finish_reason == "cancelled"
                    tokens = whole.token_ids[: len(completion.token_ids)] if is_cut else whole.token_ids
                    if completion.token_ids != tokens or streamed[choice] != tokens:
                        with lock:
                            wrong.append({"request": index, "choice": choice, "got": completion.token_ids})
                with lock:
                    seen.update(completion.finish_reason for completion in result.completions)
                    seen["preempted requests"] += result.preemptions > 0
                    seen["requests with a reused prefix"] += result.reused_tokens > 0

        memory = run_clients(client, arguments.clients, "self", seen, wrong)
        statistics = engine.statistics()
    result = {
        "provenance": provenance(),
        "minutes": arguments.minutes,
        "choices by end": dict(seen),
        "wrong": wrong,
        "running at the end": statistics.running,
        "waiting at the end": statistics.waiting,
        "blocks in use at the end": statistics.memory.num_used_blocks,
        "memory": asdict(statistics.memory),
        "steps": asdict(statistics.steps),
        **growth(memory),
    }
    write_result(result, arguments.out)


if __name__ == "__main__":
    main()

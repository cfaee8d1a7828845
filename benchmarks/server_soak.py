"""The server under trouble for a long time: the engine's soak over HTTP, with clients that leave in the middle.

    python benchmarks/server_soak.py --minutes 20 --prompts gsm8k.jsonl,humaneval.jsonl,mt-bench.jsonl

A catalogue of greedy and seeded requests is answered one at a time by plain decoding first. Then clients send requests
of the catalogue at random to a ``dspark serve``, half of them as streams, and some disconnect at a random moment. Every
answer must have the text and length that the request got alone (what arrived before a disconnect is its beginning), all
places and memory must come back, and the server must not grow.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
from provenance import provenance
from served import served
from soak import alone, catalogue, resident_bytes

from dspark.engine.request import Request
from dspark.models.loading import load_target


def body(request: Request, stream: bool) -> dict[str, Any]:
    """The request as JSON."""
    sampling = request.sampling
    return {
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "n": request.n,
        "logprobs": request.logprobs,
        "user": request.user,
        "stream": stream,
        **({} if request.max_draft_tokens is None else {"speculation": {"max_draft_tokens": request.max_draft_tokens}}),
    }


def answer(client: httpx2.Client, request: Request, leave_after: float | None) -> tuple[list[str], list[str | None]]:
    """Texts and finish reasons by choice.

    Args:
        leave_after: seconds after which the client disconnects; None to stay.
    """
    texts: list[str] = [""] * request.n
    reasons: list[str | None] = [None] * request.n
    end = None if leave_after is None else time.monotonic() + leave_after
    with client.stream("POST", "/v1/completions", json=body(request, stream=True)) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.read()!r}")
        for line in response.iter_lines():
            if line.startswith("event: error"):
                raise RuntimeError("the stream ended with an error")
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice.get("finish_reason") or reasons[choice["index"]]
            if end is not None and time.monotonic() > end:
                break
    return texts, reasons


def whole_answer(client: httpx2.Client, request: Request) -> tuple[list[str], list[str | None]]:
    """The same, in one piece."""
    response = client.post("/v1/completions", json=body(request, stream=False))
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    return [choice["text"] for choice in choices], [choice["finish_reason"] for choice in choices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="JSONL files of conversations, with commas between")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=120, help="size of the catalogue")
    parser.add_argument("--clients", type=int, default=24, help="requests at the server at once")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--memory-mib", type=int, default=120, help="of keys and values: less than the load wants")
    parser.add_argument("--policy", default="delayed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    target = load_target("embedded", dtype="int8")
    paths = [Path(path) for path in arguments.prompts.split(",")]
    requests = catalogue(target, paths, arguments.requests, arguments.seed)
    expected = alone(target, requests)
    del target

    seen: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    memory: list[dict[str, float]] = []
    lock = threading.Lock()
    options = ["--dtype", "int8", "--policy", arguments.policy, "--max-concurrency", str(arguments.concurrency)]
    options += ["--kv-memory", str(arguments.memory_mib / 1024)]
    with served(options) as server:
        began = time.monotonic()
        end = began + 60.0 * arguments.minutes

        def one(client: httpx2.Client, draw: random.Random) -> None:
            index = draw.randrange(len(requests))
            request, kind = requests[index], draw.choice(["whole", "whole", "stream", "stream", "leaves"])
            leaves_after = draw.uniform(0.0, 4.0)
            try:
                if kind == "whole":
                    texts, reasons = whole_answer(client, request)
                else:
                    texts, reasons = answer(client, request, leaves_after if kind == "leaves" else None)
            except (RuntimeError, httpx2.HTTPError) as error:
                with lock:
                    wrong.append({"request": index, "kind": kind, "error": repr(error)})
                return
            for choice, (text, reason, whole) in enumerate(zip(texts, reasons, expected[index], strict=True)):
                is_whole = reason is not None
                good = (text, reason) == (whole.text, whole.finish_reason) if is_whole else whole.text.startswith(text)
                with lock:
                    seen[f"{kind}: {reason or 'cut'}"] += 1
                    if not good or (kind != "leaves" and not is_whole):
                        wrong.append({"request": index, "choice": choice, "kind": kind, "got": text})

        def client(number: int) -> None:
            draw = random.Random(1000 * arguments.seed + number)
            with httpx2.Client(base_url=server.url, timeout=300) as connection:
                while time.monotonic() < end:
                    one(connection, draw)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(arguments.clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(5.0)
            mib = resident_bytes(server.process_id) / 2**20
            memory.append({"seconds": round(time.monotonic() - began, 1), "mib": round(mib, 1)})
            if len(memory) % 12 == 0:
                print(f"{memory[-1]} {dict(seen)} wrong: {len(wrong)}", flush=True)
        time.sleep(1.0)  # the last to leave have to be noticed
        in_use, metrics = server.in_use(), server.metrics()
    quarter = max(len(memory) // 4, 1)
    early = sum(point["mib"] for point in memory[quarter : 2 * quarter]) / quarter
    late = sum(point["mib"] for point in memory[-quarter:]) / quarter
    result = {
        "provenance": provenance(),
        "minutes": arguments.minutes,
        "choices by end": dict(seen),
        "wrong": wrong,
        "in use at the end": in_use,
        "metrics at the end": {name: value for name, value in metrics.items() if name.endswith("_total")},
        "resident MiB": {
            "second quarter": round(early, 1),
            "last quarter": round(late, 1),
            "ratio": round(late / early, 4) if early else None,
        },
        "resident": memory,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "resident"}, indent=1))


if __name__ == "__main__":
    main()

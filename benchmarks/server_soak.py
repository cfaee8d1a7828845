"""The server under trouble for a long time: the engine's soak over HTTP, with clients that leave in the middle.

    python benchmarks/server_soak.py --minutes 20 --prompts gsm8k.jsonl,humaneval.jsonl,mt-bench.jsonl

A catalogue of greedy and seeded requests is answered one at a time by plain decoding first. Then clients send requests
of the catalogue at random to a ``dspark serve``, half of them as streams, and some disconnect at a random moment. Every
answer must have the text and length that the request got alone (what arrived before a disconnect is its beginning), all
places and memory must come back, and the server must not grow.
"""

from __future__ import annotations

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
from soak import alone, catalogue, growth, parse_arguments, run_clients, write_result

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
    arguments = parse_arguments(__doc__)

    target = load_target("embedded", dtype="int8")
    paths = [Path(path) for path in arguments.prompts.split(",")]
    requests = catalogue(target, paths, arguments.requests, arguments.seed)
    expected = alone(target, requests)
    del target

    seen: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    lock = threading.Lock()
    options = ["--dtype", "int8", "--policy", arguments.policy, "--max-concurrency", str(arguments.concurrency)]
    options += ["--kv-memory", str(arguments.memory_mib / 1024)]
    with served(options) as server:
        end = time.monotonic() + 60.0 * arguments.minutes

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

        memory = run_clients(client, arguments.clients, server.process_id, seen, wrong)
        time.sleep(1.0)  # the last to leave have to be noticed
        in_use, metrics = server.in_use(), server.metrics()
    result = {
        "provenance": provenance(),
        "minutes": arguments.minutes,
        "choices by end": dict(seen),
        "wrong": wrong,
        "in use at the end": in_use,
        "metrics at the end": {name: value for name, value in metrics.items() if name.endswith("_total")},
        **growth(memory),
    }
    write_result(result, arguments.out)


if __name__ == "__main__":
    main()

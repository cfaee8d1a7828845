"""More requests than a server can take: each is answered with 200 or 429, and afterwards all is as before.

    python benchmarks/server_flood.py --seconds 30

Requests come at a steady rate, whatever becomes of them, to a ``dspark serve`` with a short queue. Then the time is
taken until everything that was accepted is answered, and until one more request is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from provenance import provenance
from served import Served, served


class Connections:
    """A client that costs the machine little: the server is what is measured."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status, and all headers as they came. Raises OSError or EOFError if there is no answer."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(headers.split(b"content-length: ")[1].split(b"\r\n")[0]))
        self._idle.append((reader, writer))
        return int(headers.split(maxsplit=2)[1]), headers

    def close(self) -> None:
        """All of them."""
        for _, writer in self._idle:
            writer.close()


async def flood(server: Served, rate: float, seconds: float, max_tokens: int) -> dict[str, Any]:
    """Send ``rate`` requests a second for ``seconds``, and what became of them."""
    outcomes: Counter[str] = Counter()
    refused_seconds: list[float] = []
    late_seconds = 0.0
    connections = Connections(server.url)

    async def one(number: int) -> None:
        body = {"prompt": f"Request {number}:", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        try:
            status, headers = await connections.post("/v1/completions", body)
        except (OSError, EOFError) as error:
            outcomes[repr(error)] += 1
            return
        outcomes[str(status) if status != 429 or b"retry-after: " in headers else "429 without Retry-After"] += 1
        if status == 429:
            refused_seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    tasks = []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        late_seconds = max(late_seconds, time.perf_counter() - due)
        tasks.append(asyncio.create_task(one(number)))
    sent = time.perf_counter()
    await asyncio.gather(*tasks)
    answered = time.perf_counter()
    await one(len(tasks))
    recovered = time.perf_counter()
    connections.close()
    ordered = sorted(refused_seconds)
    return {
        "outcomes": dict(outcomes),
        "sent a second": round(len(tasks) / (sent - began), 1),
        "latest sending, seconds": round(late_seconds, 3),
        "429 after, seconds": {
            "median": round(statistics.median(ordered), 4) if ordered else None,
            "99 %": round(ordered[int(0.99 * len(ordered))], 4) if ordered else None,
        },
        "last accepted answered after, seconds": round(answered - sent, 2),
        "next request took, seconds": round(recovered - answered, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--places", type=int, default=32, help="of the queue")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--policy", default="delayed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    options = ["--max-waiting", str(arguments.places), "--max-concurrency", str(arguments.concurrency)]
    with served([*options, "--policy", arguments.policy]) as server:
        result = asyncio.run(flood(server, arguments.rate, arguments.seconds, arguments.max_tokens))
        result["in use at the end"] = server.in_use()
    others = set(result["outcomes"]) - {"200", "429"}
    result = {"provenance": provenance(), "all are 200 or 429": not others, **result}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""llama.cpp as a peer: its server, asked over HTTP for token ids, and its own benchmark programs for single steps.

Takes jobs on its input (see worker.py); compare.py starts it.
"""

from __future__ import annotations

import argparse
import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from worker import Answer, Job, serve

START_SECONDS = 120
BLOCK = 256  # tokens that the attention's window grows by


class LlamaCpp:
    """A server with a slot for each request."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._programs, self._model, self._threads = arguments.programs, arguments.model, arguments.threads
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        slot = -(-arguments.max_length // BLOCK) * BLOCK
        options = ["--parallel", arguments.max_concurrency, "--ctx-size", arguments.max_concurrency * slot]
        options += ["--threads", self._threads, "--threads-batch", self._threads, "--cache-ram", 0, "--no-ui"]
        if arguments.speculation:
            options += ["--spec-type", arguments.speculation]
        command = [str(word) for word in (self._programs / "llama-server", "-m", self._model, *options)]
        self._server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        atexit.register(self._server.terminate)
        self._wait()
        version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True)
        self.facts: dict[str, Any] = {
            "llama.cpp": (version.stdout + version.stderr).strip().splitlines(),
            "model": self._model.name,
            "options": [str(option) for option in options],
            "threads": self._threads,
        }

    def generate(self, job: Job) -> list[Answer]:
        """Whole answers, not streamed, so that the client costs little."""
        with ThreadPoolExecutor(job.concurrency) as clients:
            return list(clients.map(partial(self._complete, tokens=job.tokens), job.prompts))

    def step_ms(self, context: int, counts: Sequence[int], steps: int) -> dict[str, dict[str, float]]:
        """Milliseconds of a pass, without sampling.

        ``requests``: llama-batched-bench, one token for each of so many requests, mean over ``steps`` passes;
        ``tokens``: llama-bench, so many tokens of one request, median of half as many passes; the LM head is computed
        for the last token only.
        """
        room = str(max(counts) * (-(-(context + steps) // BLOCK) * BLOCK))
        shape = ["-npp", str(context), "-ntg", str(steps), "-npl", ",".join(map(str, counts)), "-c", room]
        batched = self._bench("llama-batched-bench", [*shape, "-tb", str(self._threads), "--output-format", "jsonl"])
        requests = {str(line["pl"]): 1000 * line["t_tg"] / line["tg"] for line in batched}
        shape = ["-d", str(context), "-p", ",".join(map(str, counts)), "-n", "0", "-r", str(steps // 2)]
        alone = self._bench("llama-bench", [*shape, "-o", "jsonl"])
        tokens = {str(line["n_prompt"]): median(line["samples_ns"]) / 1e6 for line in alone}
        return {"requests": requests, "tokens": tokens}

    def _bench(self, program: str, options: Sequence[str]) -> list[dict[str, Any]]:
        command = [self._programs / program, "-m", self._model, "-t", str(self._threads), *options]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise RuntimeError(f"{program} failed: {run.stderr[-2000:]}")
        return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]

    def _complete(self, prompt: Sequence[int], tokens: int) -> Answer:
        content = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        return Answer(token_ids=answer["tokens"], decode_seconds=answer["timings"]["predicted_ms"] / 1000)

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._server.poll() is not None:
                sys.exit(f"llama-server ended with {self._server.returncode}")
            try:
                with urllib.request.urlopen(f"{self._url}/health"):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise TimeoutError(f"llama-server did not start in {START_SECONDS} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, help="directory of llama-server and the benchmark programs")
    parser.add_argument("--model", type=Path, help="GGUF file")
    parser.add_argument("--speculation", help="--spec-type of the server, such as ngram-simple; none by default")
    parser.add_argument("--max-concurrency", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=1024, help="prompt and answer of a request")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: LlamaCpp(arguments))


if __name__ == "__main__":
    main()

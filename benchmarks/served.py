"""A ``dspark serve`` of one's own, and what its metrics say."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that is ready."""

    url: str
    process_id: int

    def metrics(self) -> dict[str, float]:
        """All of its metrics; of those with labels the sum."""
        sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(httpx2.get(f"{self.url}/metrics", timeout=30).text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)

    def in_use(self) -> dict[str, float]:
        """Answers and blocks of memory that are held now."""
        metrics = self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "dspark_kv_blocks_used")
        return {name: metrics[name] for name in names}


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[Served]:
    """Start ``dspark serve`` with ``arguments`` on a free port; it ends with the block, and has to end well.

    Its log of requests is not shown.
    """
    command = [sys.executable, "-m", "dspark", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []

    def read(lines: Iterator[str]) -> None:
        errors.extend(line for line in lines if " INFO " not in line)

    reader = threading.Thread(target=read, args=(iter(process.stderr.readline, ""),), daemon=True)
    reader.start()
    try:
        ready = process.stdout.readline()
        if not ready.startswith("ready: "):
            raise RuntimeError(f"the server did not start: {''.join(errors)}")
        print(ready, end="", flush=True)
        yield Served(url=ready.split()[1].removesuffix("/v1"), process_id=process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
        reader.join()
        print("".join(errors), end="", flush=True)
    if code != 0:
        raise RuntimeError(f"the server ended with {code}")

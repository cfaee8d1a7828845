"""``dspark serve`` as a process of its own, on a tiny target with its drafter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from tests.cli.conftest import tiny_drafter, tiny_target

__all__ = ["tiny_drafter", "tiny_target"]

SOURCE = Path(__file__).parents[2] / "src"
KEY = "sk-never-shown"


class Process:
    """A running ``dspark serve``; what it has written so far, line by line."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dspark", "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_line(self, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        """The first line that has it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            assert self._reader.is_alive(), f"it has ended: {self.output}"
            time.sleep(0.02)
        raise AssertionError(f"no line with {pattern!r}: {self.output}")

    def end(self, *signals: int, seconds: float = 60.0) -> int:
        """Send them, and give the exit code."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)  # the second one is to find the first one heard
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    @property
    def output(self) -> str:
        """All so far."""
        return "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[Process]:
    process = Process(*arguments, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        assert process.process.stdout is not None
        process._reader.join()
        process.process.stdout.close()


def test_from_ready_to_the_end(tiny_target, tiny_drafter):
    models = ("--target", tiny_target, "--drafter", tiny_drafter, "--policy", "fixed:2", "--dtype", "float32")
    with serving(*models, "--port", 0, "--max-concurrency", 3, "--max-length", 200, "--kv-memory", 0.05) as server:
        ready = server.wait_for_line(r"ready: (http://127\.0\.0\.1:(\d+))/v1 serves tiny: (.*)")
        url, facts = ready[1], ready[3]
        for fact in ("float32 on cpu", "dspark-vanilla", "policy fixed:2", "3 answers at once", "200 tokens each"):
            assert fact in facts
        assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
        (model,) = httpx2.get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 200)
        messages = [{"role": "user", "content": "hello"}]
        answer = httpx2.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 8}, timeout=60)
        assert answer.status_code == 200, answer.text
        metrics = httpx2.get(f"{url}/metrics").text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}' in metrics
        assert re.search(r'vllm:spec_decode_num_drafts_total\{engine="0",model_name="tiny"\} [1-9]', metrics)

        busy = subprocess.run(
            [sys.executable, "-m", "dspark", "serve", "--port", ready[2]],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=120,
            check=False,
        )
        assert busy.returncode == 2
        assert f"port {ready[2]}: Address already in use" in busy.stderr
        assert "Traceback" not in busy.stderr

        assert server.end(signal.SIGTERM) == 0
        assert "shutting down" in server.output
        assert "hello" not in server.output


def test_a_key_is_asked_for_and_never_shown(tiny_target):
    models = ("--target", tiny_target, "--drafter", "none", "--host", "localhost", "--model-name", "small")
    with serving(*models, "--port", 0, "--max-length", 64, DSPARK_API_KEY=f"{KEY},other") as server:
        url = server.wait_for_line(r"ready: (\S+)/v1 serves small: .*policy off")[1]
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        assert httpx2.get(f"{url}/v1/models", headers={"authorization": "Bearer wrong-key"}).status_code == 401
        for key in (KEY, "other"):
            assert httpx2.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert server.end(signal.SIGINT) == 0
        assert " 401 " in server.output
        assert KEY not in server.output
        assert "wrong-key" not in server.output


def test_a_second_signal_ends_it_at_once(tiny_target):
    with serving("--target", tiny_target, "--drafter", "none", "--port", 0, "--max-length", 500) as server:
        url = server.wait_for_line(r"ready: (\S+)/v1")[1]
        request = {"prompt": "a", "max_tokens": 490, "ignore_eos": True, "n": 32}
        threading.Thread(target=_ask, args=(url, request), daemon=True).start()
        while 'running{engine="0",model_name="tiny"} 0' in httpx2.get(f"{url}/metrics").text:
            time.sleep(0.01)
        assert server.end(signal.SIGTERM, signal.SIGTERM) == 128 + signal.SIGTERM


def test_the_port_answers_while_steps_are_measured(tiny_target, tiny_drafter, tmp_path):
    models = ("--target", tiny_target, "--drafter", tiny_drafter)
    with serving(*models, "--port", 0, DSPARK_CACHE=str(tmp_path)) as server:
        port = server.wait_for_line(r"listening at http://127\.0\.0\.1:(\d+)")[1]
        server.wait_for_line("timing")
        health = httpx2.get(f"http://127.0.0.1:{port}/health")
        assert health.status_code == 503
        assert "loading" in health.json()["error"]["message"]
        assert httpx2.get(f"http://127.0.0.1:{port}/v1/models").status_code == 503
        assert server.end(signal.SIGTERM) == 0
        assert "ready" not in server.output
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target", "somewhere"], "--drafter"),
        (["--drafter", "none", "--policy", "delayed"], "--policy"),
        (["--policy", "sometimes"], "sometimes"),
        (["--kv-memory", "-1"], "--kv-memory"),
        (["--port", "70000"], "port"),
        (["--separate-keys"], "separate_keys"),
        (["--max-concurrency", "0"], "max_concurrency"),
        (["--drain-seconds", "-1"], "drain_seconds"),
        (["--max-body", "0"], "--max-body"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(arguments, named, capsys, monkeypatch):
    from dspark.cli import main

    monkeypatch.delenv("DSPARK_API_KEY", raising=False)
    assert main(["serve", *arguments]) == 2
    assert named in capsys.readouterr().err


def _ask(url: str, request: dict[str, object]) -> None:
    with suppress(httpx2.HTTPError):  # the server ends in the middle
        httpx2.post(f"{url}/v1/completions", json=request, timeout=60)

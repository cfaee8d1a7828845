"""benchmarks/peers: the same for every peer, by turns, and numbers that are what was measured."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tokenizer import character_tokenizer

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"

FAKE = """
import sys
sys.path.insert(0, {peers!r})
from worker import Answer, serve

class Fake:
    facts = {{"fake": "1.0"}}

    def generate(self, job):
        print("noise")
        return [Answer(token_ids=prompt[-1:] * job.tokens, decode_seconds=None) for prompt in job.prompts]

    def spin(self, turns):
        return sum(range(turns))

def make():
    if sys.argv[1:] == ["broken"]:
        raise OSError("no weights")
    return Fake()

serve(make)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(PEERS))
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(peers=str(PEERS)))
    return script


@pytest.fixture
def compare(fake: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`compare.py` in this process; the peers have processes of their own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    import compare

    def run(*options: object) -> None:
        words = [str(option) for option in options]
        monkeypatch.setattr(sys, "argv", ["compare.py", "--target", str(tiny_target), *words])
        compare.main()

    return run


@pytest.fixture
def tiny_target(tmp_path: Path) -> Path:
    """The golden Qwen3 target with a tokenizer."""
    directory = tmp_path / "tiny"
    shutil.copytree(ROOT / "tests" / "golden" / "qwen3-tiny-target", directory)
    character_tokenizer().save_pretrained(directory)
    return directory


def test_a_process_answers_in_order_whatever_it_prints(fake: Path, tmp_path: Path) -> None:
    from processes import Process

    with Process("fake", [sys.executable, str(fake)], {}, tmp_path / "log") as peer:
        assert peer.facts == {"python": ".".join(map(str, sys.version_info[:3])), "fake": "1.0"}
        result = peer.ask("generate", prompts=[[1, 2], [3]], tokens=2, concurrency=1)
        assert [answer["token_ids"] for answer in result["answers"]] == [[2, 2], [3, 3]]
        assert result["seconds"] >= 0
        before = peer.cpu_seconds()
        assert peer.ask("spin", turns=30_000_000) == sum(range(30_000_000))
        assert peer.cpu_seconds() > before
        assert peer.resident_bytes() > 2**20
        with pytest.raises(RuntimeError, match=r"fake: .*(?s:.*)no attribute 'dance'"):
            peer.ask("dance")
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_process_that_cannot_start_says_why(fake: Path, tmp_path: Path) -> None:
    from processes import Process

    with pytest.raises(RuntimeError, match=r"(?s)broken: .*no weights"):
        Process("broken", [sys.executable, str(fake), "broken"], {}, tmp_path / "log")


def test_rounds_go_through_the_prompts_and_mix_domains(fake: Path) -> None:
    from workload import MIXED, Cell, Prompt, Workload, lasting

    names = [("math", 1), ("math", 2), ("math", 3), ("code", 10), ("chat", 20), ("chat", 21)]
    prompts = [Prompt(domain=domain, token_ids=(number,)) for domain, number in names]
    workload = Workload(prompts)
    assert [cell.name for cell in workload.cells([1, 4])] == ["1 math", "1 code", "1 chat", f"4 {MIXED}"]
    alone = Cell(concurrency=1, domain="math")
    assert [workload.prompts(alone, number, 2) for number in range(2)] == [[(1,), (2,)], [(3,), (1,)]]
    mixed = workload.prompts(Cell(concurrency=4, domain=MIXED), 0, 6)
    assert mixed == [(1,), (10,), (20,), (2,), (10,), (21,)]
    ends = [{"token_ids": [5, 0, 5]}, {"token_ids": [5, 5, 0]}]
    assert lasting(prompts[:2], ends, {0}) == [prompts[1]]


def test_a_run_from_prompts_to_tables(
    compare: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"domain": domain, "turns": [text]} for domain, text in (("math", "1+1"), ("code", "f(x)"), ("math", "2"))]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "peers.json"

    compare(
        *("--prompts", questions, "--environments", tmp_path / "environments", "--out", out),
        *("--peers", "transformers", "--levels", "1,2", "--tokens", 6, "--waves", 1, "--rounds", 2, "--threads", 1),
    )
    printed = capsys.readouterr().out
    results = json.loads(out.read_text())
    assert [one["order"] for one in results["rounds"]] == [
        ["dspark-off", "transformers"],
        ["transformers", "dspark-off"],
    ]
    for one in results["rounds"]:
        assert [cell["domain"] for cell in one["cells"].values()] == ["math", "code", "mixed"]
        for cell in one["cells"].values():
            tokens = 6 * cell["concurrency"]
            assert {name: turn["tokens"] for name, turn in cell["peers"].items()} == dict.fromkeys(one["order"], tokens)
            assert cell["peers"]["dspark-off"]["agreement"] == 1
        assert one["steps"]["dspark-off"]["requests"].keys() == one["steps"]["dspark-off"]["tokens"].keys()
    assert results["peers"]["transformers"]["dtype"] == "bfloat16"
    assert results["settings"]["prompts"] == ["questions.jsonl"]
    assert str(tmp_path) not in out.read_text()
    assert {"date", "commit", "processor_flags"} <= results["provenance"].keys()

    compare("--table", "--out", out)
    assert capsys.readouterr().out == printed
    assert "| transformers |" in printed


def test_tables_show_medians_of_ratios_within_a_round(fake: Path) -> None:
    from tables import speeds, tables

    def one_round(slowness: float) -> dict[str, Any]:
        def turn(speed: float) -> dict[str, Any]:
            return {
                "tokens": 100,
                "seconds": slowness * 100 / speed,
                "user_tokens_per_second": speed / slowness,
                "agreement": 0.5,
            }

        alone = {"dspark-off": turn(60), "dspark-delayed": turn(120), "llama.cpp-q8_0": turn(80)}
        return {
            "order": [*alone, "transformers-lookup"],
            "cells": {
                "1 math": {"concurrency": 1, "domain": "math", "peers": {**alone, "transformers-lookup": turn(30)}},
                "8 mixed": {"concurrency": 8, "domain": "mixed", "peers": alone},
            },
            "steps": {},
            "idle_cpu_share": dict.fromkeys([*alone, "transformers-lookup"], 0.001),
            "resident_bytes": dict.fromkeys([*alone, "transformers-lookup"], 2**30),
        }

    results = {
        "settings": {
            "target": "embedded",
            "threads": 2,
            "tokens": 100,
            "mean_prompt_tokens": 50.0,
            "prompts": ["builtin"],
        },
        "provenance": {"machine": {"processor": "a processor"}, "commit": "abc"},
        "peers": dict.fromkeys(["dspark-off", "dspark-delayed", "llama.cpp-q8_0", "transformers-lookup"]),
        "rounds": [one_round(1), one_round(2), one_round(4)],
    }
    assert speeds(results["rounds"], "dspark-off", 1) == [60, 30, 15]
    assert speeds(results["rounds"], "transformers-lookup", 8) is None
    text = tables(results)
    assert "| dspark-delayed | 60.0 (30.0-120.0) | 60.0 (30.0-120.0) | 50% | 1.00 | 0.1% |" in text
    against = "1.50 (1.50-1.50) dspark-delayed / llama.cpp-q8_0"
    assert f"| best of llama.cpp | {against} | {against} | {against} |" in text
    lookup = "4.00 (4.00-4.00) dspark-delayed / transformers-lookup"
    assert f"| best of transformers | {lookup} | {lookup} |  |" in text


def test_what_is_missing_is_named(compare: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--peers ollama are not known: dspark-off"):
        compare("--environments", tmp_path, "--peers", "ollama")
    with pytest.raises(SystemExit, match="vllm is not prepared: run python"):
        compare("--environments", tmp_path, "--peers", "vllm")

"""Evaluation prompts by name: public benchmarks, any JSONL file, and a set of our own that is always there."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from dspark.training.data.conversations import Conversation, read_conversations
from dspark.training.data.hub import HubDataset, read_hub

__all__ = ["BENCHMARKS", "BUILTIN", "DOMAINS", "Benchmark", "EvaluationPrompt", "load_prompts", "prompts_digest"]

BUILTIN = "builtin"
"""Name of the prompts that ship with the package."""
DOMAINS = ("math", "code", "chat")
OTHER = "other"
"""Domain of a prompt whose file says nothing about it."""

_STEPS = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_COMPLETE = "Complete this Python function. Answer with the whole function.\n```python\n{prompt}```"
_PROGRAM = "Write a Python program that solves this problem; it reads standard input and prints.\n\n{prompt}"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A public benchmark.

    Attributes:
        domain: one of `DOMAINS`.
        hub: its data set in the form of `HubDataset.parse`; None where the hub has it in no form that can be streamed.
        template: what is asked about a row of the hub; ``{prompt}`` is the row's text. Files bring their own wording.
    """

    domain: str
    hub: str | None
    template: str = "{prompt}"


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(domain="math", hub="hub:openai/gsm8k/main:test:question", template=_STEPS),
    "math500": Benchmark(domain="math", hub="hub:HuggingFaceH4/MATH-500:test:problem", template=_STEPS),
    "aime25": Benchmark(domain="math", hub="hub:math-ai/aime25:test:problem", template=_STEPS),
    "mbpp": Benchmark(domain="code", hub="hub:google-research-datasets/mbpp/sanitized:test:prompt"),
    "humaneval": Benchmark(domain="code", hub="hub:openai/openai_humaneval:test:prompt", template=_COMPLETE),
    "livecodebench": Benchmark(
        domain="code", hub="hub:livecodebench/code_generation:test:question_content", template=_PROGRAM
    ),
    "mt-bench": Benchmark(domain="chat", hub="hub:philschmid/mt-bench:train:turns"),
    "alpaca": Benchmark(domain="chat", hub="hub:tatsu-lab/alpaca:train:instruction"),
    "arena-hard-v2": Benchmark(domain="chat", hub=None),
}


@dataclass(frozen=True, kw_only=True)
class EvaluationPrompt:
    """One conversation to be answered, turn by turn.

    Attributes:
        id: ``benchmark/row``, rows counted from 0.
        turns: what the user says; each is asked after the model's own answers to those before it.
    """

    id: str
    benchmark: str
    domain: str
    turns: tuple[str, ...]
    system: str | None = None


def load_prompts(
    spec: str, *, limit: int | None = None, seed: int = 0, directory: Path | None = None
) -> list[EvaluationPrompt]:
    """The prompts that ``spec`` names, in the order of its parts.

    Args:
        spec: parts with commas between them, each of them `BUILTIN`, the name of a benchmark, a JSONL file (its name
            is the benchmark's, its lines as in `read_conversations`), or a directory of such files.
        limit: prompts of a benchmark at most, chosen by ``seed``; a larger limit keeps all of a smaller one's.
        directory: where a benchmark's ``NAME.jsonl`` is looked for before the hub is asked.

    Raises:
        ValueError: naming the part that is no prompt source, or the file and line that cannot be read.
        OSError: a file cannot be opened, or the hub not be reached.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    if directory is not None and not directory.is_dir():
        raise ValueError(f"{directory} is not a directory of JSONL files named after benchmarks")
    prompts: list[EvaluationPrompt] = []
    names: set[str] = set()
    for part in (part.strip() for part in spec.split(",")):
        for name, conversations in _read(part, directory):
            if name in names:
                raise ValueError(f"two of the prompt sources are called {name}: leave one out, or rename its file")
            names.add(name)
            prompts += _chosen(name, conversations, limit, seed)
    return prompts


def prompts_digest(prompts: Sequence[EvaluationPrompt]) -> str:
    """Hash of all that is asked, in order."""
    content = json.dumps([[prompt.id, prompt.domain, prompt.system, prompt.turns] for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _read(part: str, directory: Path | None) -> list[tuple[str, list[Conversation]]]:
    if part == BUILTIN:
        with as_file(files("dspark").joinpath("assets", "prompts", f"{BUILTIN}.jsonl")) as path:
            return [(BUILTIN, list(read_conversations(path)))]
    if part in BENCHMARKS:
        return [(part, _benchmark(part, directory))]
    path = Path(part)
    if part and path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise ValueError(f"{path} has no JSONL file: its files are named NAME.jsonl after the benchmark")
        return [(file.stem, list(read_conversations(file))) for file in found]
    if part and path.is_file():
        return [(path.name.removesuffix(".jsonl"), list(read_conversations(path)))]
    raise ValueError(
        f"prompts {part!r} are neither {BUILTIN}, a JSONL file, a directory of them nor a benchmark "
        f"({', '.join(BENCHMARKS)})"
    )


def _benchmark(name: str, directory: Path | None) -> list[Conversation]:
    if directory is not None and (path := directory / f"{name}.jsonl").is_file():
        return list(read_conversations(path))
    benchmark = BENCHMARKS[name]
    if benchmark.hub is None:
        raise ValueError(
            f"{name} cannot be streamed from the hub: make a {name}.jsonl of lines like "
            '{"turns": ["..."]} and give the file, or its directory as the benchmark directory'
        )
    read = read_hub(HubDataset.parse(benchmark.hub))
    return [
        Conversation(
            user_turns=tuple(benchmark.template.format(prompt=turn) for turn in conversation.user_turns),
            system=conversation.system,
        )
        for conversation in read.conversations
    ]


def _chosen(name: str, conversations: Sequence[Conversation], limit: int | None, seed: int) -> list[EvaluationPrompt]:
    rows = list(range(len(conversations)))
    if limit is not None and limit < len(rows):
        random.Random(f"{seed} {name}").shuffle(rows)
        rows = sorted(_by_turns(rows, [conversations[row].domain for row in rows])[:limit])
    known = BENCHMARKS.get(name)
    return [
        EvaluationPrompt(
            id=f"{name}/{row}",
            benchmark=name,
            domain=conversations[row].domain or (OTHER if known is None else known.domain),
            turns=conversations[row].user_turns,
            system=conversations[row].system,
        )
        for row in rows
    ]


def _by_turns(rows: Sequence[int], domains: Sequence[str]) -> list[int]:
    """The rows, each domain's first ones before its second ones, so that a few of them have every domain."""
    seen: Counter[str] = Counter()
    turns = []
    for domain in domains:
        turns.append(seen[domain])
        seen[domain] += 1
    return [row for _, row in sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])]

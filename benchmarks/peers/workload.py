"""What every peer is asked: the same prompts, as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dspark.evaluation.benchmarks import EvaluationPrompt
from dspark.models.chat import chat_token_ids
from dspark.models.loading import read_checkpoint_json, read_stop_token_ids

MIXED = "mixed"
"""Domain of a cell whose requests come from all of them by turns."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A first turn as the target reads it."""

    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """So many requests at once, of one domain or of all."""

    concurrency: int
    domain: str

    @property
    def name(self) -> str:
        return f"{self.concurrency} {self.domain}"


class Workload:
    """Prompts that are long enough in their answers, and which of them a cell takes in a round."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        by_domain: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_domain.setdefault(prompt.domain, []).append(prompt)
        turns = zip(*(islice(cycle(alike), len(prompts)) for alike in by_domain.values()), strict=True)
        self._prompts = {**by_domain, MIXED: [prompt for turn in turns for prompt in turn]}
        self.domains = tuple(by_domain)

    def cells(self, levels: Iterable[int]) -> list[Cell]:
        """One request at a time is measured for each domain, more at once are mixed."""
        return [
            Cell(concurrency=level, domain=domain)
            for level in levels
            for domain in (self.domains if level == 1 else (MIXED,))
        ]

    def prompts(self, cell: Cell, round_number: int, count: int) -> list[tuple[int, ...]]:
        """Token ids of the next ``count`` prompts: each round goes on where the one before ended, over and over."""
        return [
            prompt.token_ids
            for prompt in islice(cycle(self._prompts[cell.domain]), round_number * count, (round_number + 1) * count)
        ]


def tokenized(prompts: Sequence[EvaluationPrompt], checkpoint: Path) -> tuple[list[Prompt], frozenset[int]]:
    """First turns in the target's chat format, and the tokens that would end an answer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    asked = []
    for prompt in prompts:
        messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        messages.append({"role": "user", "content": prompt.turns[0]})
        asked.append(Prompt(domain=prompt.domain, token_ids=tuple(chat_token_ids(tokenizer, messages))))
    generation = read_checkpoint_json(checkpoint / "generation_config.json", required=False)
    return asked, read_stop_token_ids(read_checkpoint_json(checkpoint / "config.json"), generation, tokenizer)


def lasting(prompts: Sequence[Prompt], answers: Sequence[dict[str, Any]], stop_token_ids: Set[int]) -> list[Prompt]:
    """Those whose answer goes on to its last token, so that nothing is generated behind an end."""
    pairs = zip(prompts, answers, strict=True)
    return [prompt for prompt, answer in pairs if not stop_token_ids & set(answer["token_ids"][:-1])]


def digest(prompts: Sequence[Prompt]) -> str:
    """Hash of all that is asked."""
    content = json.dumps([[prompt.domain, prompt.token_ids] for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:32]

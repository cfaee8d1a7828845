"""A peer's side of the comparison: jobs come in as lines of JSON, results go out as lines of JSON.

Only the standard library is used here, since each peer runs in a Python of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Generated tokens of a prompt, and the seconds from its first token to its last (None where they are unknown)."""

    token_ids: list[int]
    decode_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Continue every prompt greedily by ``tokens`` tokens, past any end of text, at most ``concurrency`` at a time."""

    prompts: Sequence[Sequence[int]]
    tokens: int
    concurrency: int


class Peer(Protocol):
    """What is compared.

    Attributes:
        facts: versions and settings, for the record.
    """

    facts: Mapping[str, Any]

    def generate(self, job: Job) -> Sequence[Answer]:
        """All answers, in the order of the prompts."""
        ...


def serve(make_peer: Callable[[], Peer]) -> None:
    """Make the peer, say that it is ready, then do jobs until the input ends.

    A job is ``{"do": METHOD, ...}`` with the arguments of a method of the peer; its result is ``{"result": ...}``, of
    ``generate`` with the seconds that it took. An error is ``{"error": TRACEBACK}`` and ends the peer. What the peer
    prints goes to stderr.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: Mapping[str, Any]) -> None:
        results.write(json.dumps(content) + "\n")
        results.flush()

    try:
        peer = make_peer()
        answer({"facts": {"python": sys.version.split()[0], **peer.facts}})
        for line in sys.stdin:
            order = json.loads(line)
            if (name := order.pop("do")) == "generate":
                began = time.perf_counter()
                answers = peer.generate(Job(**order))
                seconds = time.perf_counter() - began
                answer({"result": {"seconds": seconds, "answers": [asdict(one) for one in answers]}})
            else:
                answer({"result": getattr(peer, name)(**order)})
    except Exception:
        answer({"error": traceback.format_exc()})

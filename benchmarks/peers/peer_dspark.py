"""This repository's engine as a peer: one policy, int8 by default.

Takes jobs on its input (see worker.py); compare.py starts it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from worker import Answer, Job, serve

from dspark import __version__
from dspark.drafters.calibration_file import drafter_fingerprint
from dspark.engine.core import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.loading import load_parts
from dspark.engine.request import Request, RequestResult
from dspark.scheduling import parse_policy
from dspark.types import Segment


class DSpark:
    """An engine for each concurrency, over the same models. Nothing of earlier prompts is reused."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(arguments.threads)
        self._policy, self._max_length = arguments.policy, arguments.max_length
        settings = EngineSettings(max_concurrency=arguments.max_concurrency, max_length=self._max_length)
        self._parts = load_parts(
            arguments.target,
            arguments.drafter,
            policy=parse_policy(self._policy),
            dtype=arguments.dtype,
            device="cpu",
            cost=None,
            settings=settings,
        )
        self._engines: dict[int, Engine] = {}
        drafter = self._parts.drafter
        self.facts: dict[str, Any] = {
            "dspark": __version__,
            "torch": torch.__version__,
            "policy": self._policy,
            "dtype": self._parts.target.model.compute_dtype,
            "target_fingerprint": self._parts.target.model.fingerprint,
            "drafter_fingerprint": None if drafter is None else drafter_fingerprint(drafter),
            "threads": torch.get_num_threads(),
        }

    def generate(self, job: Job) -> list[Answer]:
        """All prompts are submitted; the engine runs so many at once."""
        if job.concurrency not in self._engines:
            self._engines[job.concurrency] = Engine(
                self._parts.target,
                self._parts.drafter,
                policy=parse_policy(self._policy),
                cost=self._parts.cost,
                settings=EngineSettings(
                    max_concurrency=job.concurrency, max_length=self._max_length, reuse_prefixes=False
                ),
            )
        requests = [Request(prompt_ids=tuple(prompt), max_tokens=job.tokens) for prompt in job.prompts]
        return [_answer(result) for result in self._engines[job.concurrency].generate(requests)]

    def step_ms(self, context: int, counts: Sequence[int], steps: int) -> dict[str, dict[str, float]]:
        """Milliseconds of the target's pass with the logits of every token, mean over ``steps`` passes.

        ``requests``: one token for each of so many requests; ``tokens``: so many tokens of one request.
        """
        for count in (1, max(counts)):  # what runs first is slower
            self._pass_ms(context, 1, count, 1)
        return {
            "requests": {str(count): self._pass_ms(context, count, 1, steps) for count in counts},
            "tokens": {str(count): self._pass_ms(context, 1, count, steps) for count in counts},
        }

    @torch.inference_mode()
    def _pass_ms(self, context: int, requests: int, tokens: int, steps: int) -> float:
        target = self._parts.target.model
        cache = target.new_cache(requests, context + max(tokens, steps + 1))
        draw = torch.Generator().manual_seed(0)
        ids = partial(torch.randint, 0, target.config.vocab_size, generator=draw)
        for slot in range(requests):
            target.forward(ids((context,)), [Segment(slot, 0, context)], cache)
        began = 0.0
        for step in range(steps + 1):
            if step == 1:  # the pass before warms up
                began = time.perf_counter()
            if tokens > 1:
                cache.truncate(0, context)
            start = cache.lengths[0]
            segments = [Segment(slot, start, tokens) for slot in range(requests)]
            target.forward(ids((requests * tokens,)), segments, cache, logit_rows=range(requests * tokens))
        return 1000 * (time.perf_counter() - began) / steps


def _answer(result: RequestResult) -> Answer:
    assert result.first_token_seconds is not None, "an answer has at least one token"
    return Answer(
        token_ids=list(result.completions[0].token_ids), decode_seconds=result.seconds - result.first_token_seconds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--drafter", help="directory; by default ours, for the embedded target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="off")
    parser.add_argument("--max-concurrency", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=1024, help="prompt and answer of a request")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: DSpark(arguments))


if __name__ == "__main__":
    main()

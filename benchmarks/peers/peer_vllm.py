"""vLLM's CPU build as a peer: its engine, in the process or beside it as it likes.

Takes jobs on its input (see worker.py); compare.py starts it, with the Python of vLLM's environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from worker import Answer, Job, serve

KV_MEMORY_GIB = 2


class Vllm:
    """An engine that is stepped. Nothing of earlier prompts is reused."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        processors = sorted(os.sched_getaffinity(0))[: arguments.threads]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_MEMORY_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": arguments.bind or ",".join(map(str, processors)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(arguments.separate_process)),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        os.environ.update(settings)
        import torch
        import vllm

        self._make_parameters = vllm.SamplingParams
        self._final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self._engine = vllm.LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.max_length,
            max_num_seqs=arguments.max_concurrency,
            enable_prefix_caching=False,
            disable_log_stats=False,  # the times of first and last tokens
        ).llm_engine
        self._count = 0
        self.facts: dict[str, Any] = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "environment": settings,
        }

    def generate(self, job: Job) -> list[Answer]:
        """Each request that finishes is replaced at once."""
        parameters = self._make_parameters(
            temperature=0.0, max_tokens=job.tokens, ignore_eos=True, output_kind=self._final_only
        )
        waiting, answers = list(enumerate(job.prompts)), dict[str, Answer]()
        names: list[str] = []
        while len(answers) < len(job.prompts):
            while waiting and len(names) - len(answers) < job.concurrency:
                names.append(self._add(waiting.pop(0)[1], parameters))
            for output in self._engine.step():
                if output.finished:
                    answers[output.request_id] = _answer(output)
        return [answers[name] for name in names]

    def _add(self, prompt: Sequence[int], parameters: Any) -> str:
        self._count += 1
        self._engine.add_request(str(self._count), {"prompt_token_ids": list(prompt)}, parameters)
        return str(self._count)


def _answer(output: Any) -> Answer:
    times = output.metrics
    seconds = None if times is None else times.last_token_ts - times.first_token_ts
    return Answer(token_ids=list(output.outputs[0].token_ids), decode_seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-concurrency", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=1024, help="prompt and answer of a request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bind", help="VLLM_CPU_OMP_THREADS_BIND; by default the first processors, one a thread")
    parser.add_argument("--separate-process", action="store_true", help="run the engine beside the process that asks")
    arguments = parser.parse_args()
    serve(lambda: Vllm(arguments))


if __name__ == "__main__":
    main()

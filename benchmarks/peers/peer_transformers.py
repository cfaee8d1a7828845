"""transformers as a peer: `generate`, plain or with prompt lookup.

Takes jobs on its input (see worker.py); compare.py starts it. Requests that run at once are a batch, padded on the
left; prompt lookup takes one request at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from worker import Answer, Job, serve


class Moments(transformers.StoppingCriteria):
    """When each step of `generate` ended; stops nothing."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seconds.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """A model with its `generate`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(arguments.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, arguments.dtype)
        ).eval()
        self._model.generation_config = transformers.GenerationConfig()  # no end of text
        self._lookup = arguments.lookup
        self.facts: dict[str, Any] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": arguments.dtype,
            "attention": self._model.config._attn_implementation,
            "prompt_lookup_num_tokens": self._lookup,
            "threads": torch.get_num_threads(),
        }

    def generate(self, job: Job) -> list[Answer]:
        """Batch after batch."""
        size = 1 if self._lookup else job.concurrency
        batches = [job.prompts[start : start + size] for start in range(0, len(job.prompts), size)]
        return [answer for batch in batches for answer in self._batch(batch, job.tokens)]

    def _batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        moments = Moments()
        config = transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=self._lookup or None
        )
        output = self._model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=[moments])
        answers = output[:, length:].tolist()
        seconds = moments.seconds[-1] - moments.seconds[0]
        return [Answer(token_ids=answer, decode_seconds=seconds) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup drafts; 0 for plain decoding")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: Transformers(arguments))


if __name__ == "__main__":
    main()

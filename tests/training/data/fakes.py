"""A byte-level tokenizer with a chat template, and a batched generator whose output is a function of the request."""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.decoding.request import GenerationCompletion, GenerationRequest
from dspark.training.data import DataSettings, ForbiddenPrompts, TargetIdentity, regenerate
from dspark.training.data.prompts import FilePrompts, PromptSource, SelfPrompts, file_prompts
from dspark.training.data.steering import SteeringPrompt

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a default.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, START, END = 0, 1, 2

TARGET = TargetIdentity(name="fake", dtype="float32", vocab_size=259)


def make_tokenizer(template: str | None = CHATML, *, eos: str | None = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Three special tokens, then one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, extra_special_tokens=[token for token in SPECIAL if token != eos]
    )
    fast.chat_template = template
    return fast


class FakeGenerator:
    """Writes words drawn from (prompt, settings). Completions come in an order drawn from ``order_seed``.

    ``kill_after``: raise KeyboardInterrupt instead of yielding completion number ``kill_after``.
    ``pause``: seconds to wait before each completion.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        concurrency: int = 7,
        order_seed: int = 0,
        kill_after: int | None = None,
        pause: float = 0.0,
    ) -> None:
        self.concurrency = concurrency
        self.requests: list[GenerationRequest] = []
        self.largest_batch = 0
        self._tokenizer = tokenizer
        self._order = random.Random(order_seed)
        self._kill_after = kill_after
        self._pause = pause

    def __call__(self, requests: Iterator[GenerationRequest | None]) -> Iterator[GenerationCompletion]:
        running: list[GenerationRequest] = []
        yielded = 0
        exhausted = False
        while True:
            while not exhausted and len(running) < self.concurrency:
                try:
                    request = next(requests)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    assert running, "nothing is running and the feed has nothing to give"
                    break
                running.append(request)
                self.requests.append(request)
            self.largest_batch = max(self.largest_batch, len(running))
            if not running:
                return
            if self._kill_after is not None and yielded >= self._kill_after:
                raise KeyboardInterrupt
            time.sleep(self._pause)
            yielded += 1
            yield self.complete(running.pop(self._order.randrange(len(running))))

    def complete(self, request: GenerationRequest) -> GenerationCompletion:
        """What this generator answers to a request, whatever else runs."""
        assert request.settings.seed is not None
        key = repr((request.prompt_ids, request.settings.temperature, request.settings.seed))
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        kind = rng.random()
        count = 1 if kind < 0.1 else rng.randrange(2, 12)
        vocabulary = ["one", "two", "three", "four", "five", "six"]
        text = "" if kind < 0.05 else " ".join(rng.choice(vocabulary) for _ in range(count))
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        ids.append(START if 0.9 < kind < 0.95 and START in request.stop_token_ids else END)
        if kind > 0.95:
            ids = ids[:-1] * 100
        ids = ids[: request.max_tokens]
        assert ids, "the request leaves no room"
        return GenerationCompletion(
            request_id=request.request_id,
            token_ids=tuple(ids),
            finish_reason="stop" if ids[-1] in request.stop_token_ids else "length",
        )


SELF = SelfPrompts(
    name="self-test",
    steering=(
        SteeringPrompt(system="You count.", weight=2.0, openers=("", "Count from"), closers=("", "\nThink first.")),
        SteeringPrompt(system="You add."),
    ),
)


def make_settings(**changes: Any) -> DataSettings:
    defaults: dict[str, Any] = {
        "rows": 60, "seed": 3, "max_answer_tokens": 40, "max_prompt_tokens": 60, "max_length": 300,
        "steered_answer_fraction": 0.3,
    }  # fmt: skip
    return DataSettings(**(defaults | changes))


def write_prompts(file: Path) -> FilePrompts:
    file.write_text(
        '{"turns": ["How many?", "And then?", "Is that all?"]}\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"},'
        ' {"role": "assistant", "content": "Left out."}, {"role": "user", "content": "Why not?"}]}\n'
        '{"turns": ["One turn only"], "category": "x"}\n'
        '{"turns": ["What a forbidden question this is to ask anyone at all"]}\n'
    )
    return file_prompts(file)


def run(
    directory: Path,
    *,
    sources: Sequence[PromptSource] = (SELF,),
    settings: DataSettings | None = None,
    generator: FakeGenerator | None = None,
    forbidden: Sequence[str] = (),
    **others: Any,
) -> Any:
    """``regenerate`` with the fakes."""
    tokenizer = make_tokenizer()
    return regenerate(
        directory,
        generate=generator or FakeGenerator(tokenizer),
        tokenizer=tokenizer,
        target=TARGET,
        sources=sources,
        settings=settings or make_settings(),
        forbidden=[ForbiddenPrompts(name="bench", texts=tuple(forbidden))] if forbidden else (),
        **others,
    )


if __name__ == "__main__":  # a run to be killed: DIRECTORY PROMPTS ROWS
    fast = make_tokenizer()
    run(
        Path(sys.argv[1]),
        sources=[SELF, file_prompts(Path(sys.argv[2]))],
        settings=make_settings(rows=int(sys.argv[3])),
        generator=FakeGenerator(fast, pause=0.003),
    )

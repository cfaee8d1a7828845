"""``dspark generate``: answer prompts with the target, sped up by a drafter."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dspark.cli.options import (
    LENGTH,
    MODELS,
    PROMPT,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    FrequencyPenaltyOption,
    JsonOption,
    MaxDraftTokensOption,
    MaxTokensOption,
    MinPOption,
    PresencePenaltyOption,
    PromptsOption,
    RepetitionPenaltyOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)

if TYPE_CHECKING:
    from dspark.cli.models import Models
    from dspark.cli.prompts import Prompt
    from dspark.decoding.settings import SamplingSettings
    from dspark.engine.result import GenerationResult
    from dspark.engine.speculation import SpeculationSettings


def generate(
    prompt: Annotated[
        str | None, Parameter(group=PROMPT, help="What to answer; put `--` before one that starts with a hyphen.")
    ] = None,
    /,
    *,
    stdin: Annotated[
        bool,
        Parameter(
            name=("--stdin", "-"), negative=(), show_default=False, group=PROMPT, help="Read it from standard input."
        ),
    ] = False,
    prompts: PromptsOption = None,
    system: Annotated[
        str | None,
        Parameter(
            group=PROMPT,
            help="The system message, in place of the chat template's own; a prompt of --prompts may have another.",
        ),
    ] = None,
    raw: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, group=PROMPT, help="Continue plain text, without the chat template."
        ),
    ] = False,
    json: JsonOption = False,
    target: TargetOption = "embedded",
    drafter: DrafterOption = None,
    no_speculation: Annotated[
        bool,
        Parameter(negative=(), show_default=False, group=MODELS, help="The target alone, as with `--drafter none`."),
    ] = False,
    max_draft_tokens: MaxDraftTokensOption = None,
    confidence_threshold: Annotated[
        float | None,
        Parameter(
            group=MODELS,
            help="Verify a draft up to its first token that is less likely than this to be accepted, 0 to 1. Changes"
            " the speed, never the output.",
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = None,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = 256,
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(), show_default=False, group=LENGTH, help="End before this text; may be given several times."
        ),
    ] = (),
) -> None:
    """Answer a prompt with the target, sped up by a drafter; the output is the target's own.

    The answer streams to standard output, a line of numbers to standard error. Examples:

    - `dspark generate "Why is the sky blue?"`
    - `dspark generate "Why is the sky blue?" --no-speculation` gives the same words, more slowly
    - `dspark generate "Write a poem." --temperature 0.8 --top-p 0.95 --seed 7`
    - `cat question.txt | dspark generate - --json`
    - `dspark generate --prompts questions.jsonl --json > answers.jsonl`

    With `--json` a prompt gives one object: `text`, `token_ids`, `finish_reason`, `rounds`, `drafted`, `verified`,
    `accepted`, `accepted_length` (tokens a round), `seconds` and more; with `--prompts` it is one a line, and `prompt`
    and `turn` say which (counted from 0).
    """
    conversations = _conversations(prompt, stdin, prompts)
    if raw and system is not None:
        raise ValueError("--system has no place in --raw: plain text has no roles; put it into the prompt")
    if raw and any(conversation.system is not None for conversation in conversations):
        raise ValueError("a system message in --prompts has no place in --raw: plain text has no roles; take it out")

    from dspark.cli.models import open_models, usual_draft_tokens
    from dspark.decoding.settings import SamplingSettings
    from dspark.engine.speculation import SpeculationSettings

    speculation = SpeculationSettings(max_draft_tokens=max_draft_tokens, confidence_threshold=confidence_threshold)
    settings = SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    models = open_models(target=target, drafter=drafter, speculation=not no_speculation, dtype=dtype, device=device)
    if confidence_threshold is None:
        speculation = replace(speculation, max_draft_tokens=usual_draft_tokens(models, max_draft_tokens))
    answerer = _Answerer(
        models=models,
        settings=settings,
        speculation=speculation,
        max_tokens=max_tokens,
        stop=stop,
        system=system,
        raw=raw,
        stream=not json,
    )
    results = []
    for index, conversation in enumerate(conversations):
        for turn, result in enumerate(answerer.answer(conversation)):
            results.append(result)
            if json:
                place = {} if prompts is None else {"prompt": index, "turn": turn}
                print(jsonlib.dumps(place | result.to_json()), flush=True)
    if not json:
        print(_summary(results), file=sys.stderr)


def _conversations(prompt: str | None, stdin: bool, prompts: PromptsOption) -> list[Prompt]:
    from dspark.cli.prompts import Prompt, read_prompts

    if (prompt is not None) + stdin + (prompts is not None) != 1:
        raise ValueError("give one of: a prompt, - (the prompt comes from standard input), --prompts FILE")
    if prompts is not None:
        return read_prompts(prompts)
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise ValueError("the prompt is empty: give some text to answer")
    return [Prompt(turns=(text,))]


@dataclass(frozen=True, kw_only=True)
class _Answerer:
    models: Models
    settings: SamplingSettings
    speculation: SpeculationSettings
    max_tokens: int
    stop: Sequence[str]
    system: str | None
    raw: bool
    stream: bool

    def answer(self, conversation: Prompt) -> Iterator[GenerationResult]:
        """Answer one turn after the other, each with all the earlier ones before it."""
        from dspark.models.chat import chat_token_ids, text_token_ids

        tokenizer = self.models.target.tokenizer
        system = self.system if conversation.system is None else conversation.system
        messages = [] if system is None else [{"role": "system", "content": system}]
        text = ""
        for turn in conversation.turns:
            if self.raw:
                text += turn
                prompt_ids = text_token_ids(tokenizer, text)
            else:
                messages.append({"role": "user", "content": turn})
                prompt_ids = chat_token_ids(tokenizer, messages)
            result = self._generate(prompt_ids)
            text += result.text
            messages.append({"role": "assistant", "content": result.text})
            yield result

    def _generate(self, prompt_ids: Sequence[int]) -> GenerationResult:
        from dspark.engine.generation import generate as generate_rounds

        target = self.models.target
        result = None
        for event in generate_rounds(
            target.model,
            self.models.drafter,
            prompt_ids,
            self.settings,
            max_tokens=self.max_tokens,
            stop_token_ids=target.stop_token_ids,
            stop_strings=self.stop,
            tokenizer=target.tokenizer,
            speculation=self.speculation,
        ):
            if self.stream:
                print(event.text, end="", flush=True)
            result = event.result
        if self.stream:
            print(flush=True)
        assert result is not None, "generation ended without a result"
        return result


def _summary(results: Sequence[GenerationResult]) -> str:
    """The numbers of all answers, pooled, in a line."""
    from dspark.cli.comparison import pooled_accepted_length, tokens_per_second

    tokens = sum(len(result.token_ids) for result in results)
    seconds = sum(result.seconds for result in results)
    line = f"{tokens} tokens in {seconds:.2f} s = {tokens_per_second(results):.1f} tokens/s"
    if len(results) > 1:
        line = f"{len(results)} answers, {line}"
    if any(result.drafted for result in results):
        rounds = sum(result.rounds for result in results)
        accepted, verified = sum(result.accepted for result in results), sum(result.verified for result in results)
        line += f", {rounds} rounds, accepted length {pooled_accepted_length(results):.2f}"
        line += f", {accepted} of {verified} verified draft tokens accepted"
    return f"[{line}]"

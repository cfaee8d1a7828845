"""``dspark demo``: real prompts answered by the target alone and with DSpark, streaming, then compared."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dspark.cli.options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    MaxDraftTokensOption,
    MaxTokensOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
)

if TYPE_CHECKING:
    from dspark.cli.demo_display import Display
    from dspark.cli.models import Models
    from dspark.cli.prompts import Prompt
    from dspark.decoding.settings import SamplingSettings
    from dspark.engine.result import GenerationResult, RoundEvent
    from dspark.engine.speculation import SpeculationSettings

WARM_UP_TOKENS = 8


def demo(
    *,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    prompts: PromptsOption = None,
    target: TargetOption = "embedded",
    drafter: DrafterOption = None,
    max_draft_tokens: MaxDraftTokensOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Answer a few real prompts by the target alone and with DSpark, and compare.

    Both answers stream as they are made; the draft tokens that the target accepted are coloured and underlined (in
    «quotes» where there is no terminal). Then: tokens a second both ways, speed-up, accepted length (tokens a round),
    acceptance by position, and whether both outputs were the same. They must be when greedy, and with `--seed` at any
    temperature. Of each of the `--prompts` the first turn is asked. Ctrl-C ends early and shows what there is.
    """
    from dspark.cli.comparison import Comparison, Report
    from dspark.cli.demo_display import Display
    from dspark.cli.models import open_models, usual_draft_tokens
    from dspark.cli.prompts import read_prompts
    from dspark.decoding.settings import SamplingSettings
    from dspark.engine.speculation import SpeculationSettings

    with _prompts_path(prompts) as path:
        conversations = read_prompts(path)
    settings = SamplingSettings(temperature=temperature, seed=seed)
    console = Console(quiet=json, highlight=False, emoji=False)
    with console.status(f"Opening the target ({target}) and its drafter ..."):
        models = open_models(target=target, drafter=drafter, speculation=True, dtype=dtype, device=device)
    if models.drafter is None:
        raise ValueError(
            "--drafter none leaves nothing to compare: name a drafter, or use `dspark generate --no-speculation`"
        )

    drafting = SpeculationSettings(max_draft_tokens=usual_draft_tokens(models, max_draft_tokens))
    display = Display(console=console)
    display.introduce(models, settings, device=device, max_draft_tokens=drafting.max_draft_tokens)
    comparisons: list[Comparison] = []
    interrupted = False
    try:
        _warm_up(models, settings, conversations[0], drafting)
        for number, conversation in enumerate(conversations, start=1):
            display.prompt(f"{number} of {len(conversations)}", conversation)
            plain = _answer(models, settings, conversation, max_tokens, display, speculation=None)
            speculative = _answer(models, settings, conversation, max_tokens, display, speculation=drafting)
            comparisons.append(Comparison(prompt=conversation, plain=plain, speculative=speculative))
    except KeyboardInterrupt:
        interrupted = True

    if comparisons:
        report = Report(comparisons=tuple(comparisons), repeatable=settings.is_greedy or seed is not None)
        if json:
            choices: dict[str, Any] = {
                "target": models.target.name,
                "drafter": models.drafter_name,
                "dtype": models.target.model.compute_dtype,
                "device": device,
            }
            choices["max_draft_tokens"] = drafting.max_draft_tokens
            sampling = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
            print(jsonlib.dumps(choices | sampling | {"environment": _environment()} | report.to_json()))
        else:
            display.report(report)
    if interrupted:
        raise KeyboardInterrupt


def _answer(
    models: Models,
    settings: SamplingSettings,
    prompt: Prompt,
    max_tokens: int,
    display: Display,
    *,
    speculation: SpeculationSettings | None,
) -> GenerationResult:
    from dspark.cli.demo_display import AcceptedText

    display.start("with DSpark" if speculation else "target alone")
    splitter = AcceptedText(models.target.tokenizer)
    result = None
    for event in _rounds(models, settings, prompt, max_tokens, speculation=speculation):
        accepted, rest = splitter.split(event)
        display.increment(accepted, accepted=True)
        display.increment(rest, accepted=False)
        result = event.result
    assert result is not None, "generation ended without a result"
    display.end(result)
    return result


def _rounds(
    models: Models,
    settings: SamplingSettings,
    prompt: Prompt,
    max_tokens: int,
    *,
    speculation: SpeculationSettings | None,
) -> Iterator[RoundEvent]:
    from dspark.engine.generation import generate
    from dspark.models.chat import chat_token_ids

    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    messages.append({"role": "user", "content": prompt.turns[0]})
    return generate(
        models.target.model,
        None if speculation is None else models.drafter,
        chat_token_ids(models.target.tokenizer, messages),
        settings,
        max_tokens=max_tokens,
        stop_token_ids=models.target.stop_token_ids,
        tokenizer=models.target.tokenizer,
        speculation=speculation,
    )


def _warm_up(models: Models, settings: SamplingSettings, prompt: Prompt, drafting: SpeculationSettings) -> None:
    """Pay for first-time work (allocations, kernel selection) outside the measurement."""
    for speculation in (None, drafting):
        for _ in _rounds(models, settings, prompt, WARM_UP_TOKENS, speculation=speculation):
            pass


@contextmanager
def _prompts_path(prompts: Path | None) -> Iterator[Path]:
    if prompts is not None:
        yield prompts
    else:
        with as_file(files("dspark.cli").joinpath("demo_prompts.jsonl")) as path:
            yield path


def _environment() -> dict[str, Any]:
    import platform

    import torch

    from dspark import __version__

    return {
        "dspark": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }

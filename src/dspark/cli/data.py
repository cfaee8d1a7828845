"""``dspark data``: let the target write training data for its drafter."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from dspark.cli.options import LENGTH, PROMPT, SAMPLING, DeviceOption, DtypeOption, JsonOption, TargetOption

if TYPE_CHECKING:
    from dspark.training.data.manifest import ForbiddenPrompts
    from dspark.training.data.regeneration import DataProgress, DataResult
    from dspark.training.data.settings import DataSettings

RUN = Group("Run", sort_key=4)
SECONDS_BETWEEN_LINES = 15.0


def data(
    out: Annotated[Path, Parameter(help="Directory for the rows; a run that was stopped there goes on.")],
    /,
    *,
    rows: Annotated[
        int,
        Parameter(group=RUN, help="Rows to plan. A few are dropped on the way; a larger number extends the directory."),
    ] = 2000,
    source: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=" ".join,
            group=PROMPT,
            help="Where prompts come from, may be given several times: `self` (the target writes the user's messages;"
            " also `self-math`, `self-code`, `self-chat`) or a JSONL file with `turns` or `messages`."
            " `=SHARE` behind it sets its part of the rows, as in `self=3`.",
        ),
    ] = ("self",),
    forbid: Annotated[
        tuple[Path, ...],
        Parameter(
            negative=(),
            show_default=False,
            group=PROMPT,
            help="JSONL file of prompts to stay clear of, such as a benchmark: a prompt that shares 8 words in a row"
            " with one of them is dropped. May be given several times.",
        ),
    ] = (),
    target: TargetOption = "embedded",
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "cpu",
    temperatures: Annotated[
        str, Parameter(group=SAMPLING, help="Temperatures of the answers, one drawn for each row.")
    ] = "0,0.7,1",
    steered_answers: Annotated[
        float,
        Parameter(
            group=SAMPLING,
            help="Share of self-prompted rows answered under the system prompt that steered the user's message;"
            " the others are answered under the chat template's default.",
        ),
    ] = 0.1,
    seed: Annotated[int, Parameter(group=SAMPLING, help="Another seed gives other rows.")] = 0,
    max_tokens: Annotated[int, Parameter(group=LENGTH, help="End an answer after this many tokens.")] = 256,
    max_prompt_tokens: Annotated[
        int, Parameter(group=LENGTH, help="Drop a self-written user's message that is longer than this.")
    ] = 192,
    max_length: Annotated[int, Parameter(group=LENGTH, help="Longest row in tokens, prompt included.")] = 640,
    max_concurrency: Annotated[
        int, Parameter(group=RUN, help="Rows generated at the same time. More is faster and takes more memory.")
    ] = 96,
    json: JsonOption = False,
) -> int:
    """Let the target write training data for its drafter.

    A drafter learns to say what its target says, so every answer in the data is the target's own. Prompts come from the
    target too, steered to math, code and chat, or from files. Examples:

    - `dspark data data/first --rows 2000`
    - `dspark data data/mixed --source self=3 --source prompts/gsm8k-train.jsonl --forbid benchmarks/gsm8k.jsonl`
    - `dspark data data/first --rows 8000` goes on with the first one

    `OUT` gets `rows-00000.jsonl` and so on (`token_ids`, and `response_spans`: which of them the target wrote),
    `dropped.jsonl` (rows that came to nothing, with the reason) and `manifest.json` (settings and counts, also printed
    by `--json`). Ctrl-C or a crash loses only the rows that were being written: the same command goes on from there.
    """
    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.training.data.settings import DataSettings

    settings = DataSettings(
        rows=rows,
        seed=seed,
        temperatures=_numbers(temperatures),
        max_answer_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_length=max_length,
        steered_answer_fraction=steered_answers,
    )
    with _progress_display(show=not json) as show:
        result = _make_rows(
            out,
            settings=settings,
            source=source,
            forbid=forbid,
            target=target,
            dtype=dtype,
            device=device,
            max_concurrency=max_concurrency,
            on_progress=show,
        )
    if json:
        print(jsonlib.dumps({**result.manifest, "interrupted": result.interrupted}))
    else:
        print(_summary(out, result), file=sys.stderr)
    return EXIT_INTERRUPTED if result.interrupted else EXIT_OK


def _make_rows(
    out: Path,
    *,
    settings: DataSettings,
    source: Sequence[str],
    forbid: Sequence[Path],
    target: str,
    dtype: str,
    device: str,
    max_concurrency: int,
    on_progress: Callable[[DataProgress], None] | None,
) -> DataResult:
    """Load the target and make the rows that ``out`` lacks; mistakes are found before it is loaded where possible."""
    if max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {max_concurrency}")
    from dspark.training.data.prompts import parse_sources

    sources = parse_sources(source)
    forbidden = _read_forbidden(forbid)

    from dspark.engine.batch import BatchGenerator
    from dspark.models.loading import load_target
    from dspark.training.data.manifest import TargetIdentity
    from dspark.training.data.regeneration import regenerate

    loaded = load_target(target, dtype=dtype, device=device)
    generator = BatchGenerator(
        loaded.model, max_concurrency=min(max_concurrency, settings.rows), max_length=settings.max_length
    )
    if generator.max_length < settings.max_length:
        raise ValueError(
            f"--max-length is {settings.max_length}, but the target's context is {generator.max_length} tokens; "
            f"give at most {generator.max_length}"
        )
    return regenerate(
        out,
        generate=generator.run,
        tokenizer=loaded.tokenizer,
        target=TargetIdentity(
            name=loaded.name, dtype=loaded.model.compute_dtype, vocab_size=loaded.model.config.vocab_size
        ),
        sources=sources,
        settings=settings,
        forbidden=forbidden,
        stop_token_ids=loaded.stop_token_ids,
        on_progress=on_progress,
    )


def _read_forbidden(files: Sequence[Path]) -> list[ForbiddenPrompts]:
    from dspark.training.data.manifest import ForbiddenPrompts
    from dspark.training.data.prompts import read_conversations

    forbidden = [
        ForbiddenPrompts(
            name=file.name,
            texts=tuple(turn for conversation in read_conversations(file) for turn in conversation.user_turns),
        )
        for file in files
    ]
    names = [prompts.name for prompts in forbidden]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--forbid: two files are called {name}; rename one of them")
    return forbidden


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--temperatures must be numbers separated by commas, like 0,0.7,1; got {text!r}") from None


@contextmanager
def _progress_display(*, show: bool) -> Iterator[Callable[[DataProgress], None] | None]:
    """Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing unless ``show``."""
    if not show:
        yield None
        return
    if not sys.stderr.isatty():
        yield _LineDisplay()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[counts]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=None, counts="loading the target")

        def update(progress: DataProgress) -> None:
            bar.update(task, total=progress.planned, completed=progress.done, counts=_counts(progress))

        yield update


class _LineDisplay:
    """Prints how far the run is, at most every ``SECONDS_BETWEEN_LINES``."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def __call__(self, progress: DataProgress) -> None:
        if progress.done == progress.planned or time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            print(f"{progress.done}/{progress.planned} rows, {_counts(progress)}", file=sys.stderr, flush=True)


def _counts(progress: DataProgress) -> str:
    return (
        f"{progress.response_tokens:,} answer tokens, {progress.dropped} dropped, "
        f"{progress.tokens_per_second:,.0f} tokens/s"
    )


def _summary(out: Path, result: DataResult) -> str:
    manifest = result.manifest
    dropped = ", ".join(f"{count} {reason}" for reason, count in manifest["dropped"].items()) or "none"
    text = (
        f"{out}: {manifest['rows']:,} rows, {manifest['response_tokens']:,} answer tokens of "
        f"{manifest['total_tokens']:,}; dropped: {dropped}"
    )
    if result.interrupted:
        return f"interrupted after {manifest['done']} of {manifest['planned']} rows; the same command goes on.\n{text}"
    wanted = manifest["recipe"]["settings"]["rows"]
    if manifest["planned"] < wanted:
        text += f"\nonly {manifest['planned']} of the {wanted} rows could be planned: the prompt files have no more"
    return text

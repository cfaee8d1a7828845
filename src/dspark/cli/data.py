"""``dspark data``: let the target write training data for its drafter."""

from __future__ import annotations

import json as jsonlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from dspark.cli.options import (
    LENGTH,
    PROMPT,
    SAMPLING,
    DeviceOption,
    DtypeOption,
    ForbidOption,
    JsonOption,
    TargetOption,
)

if TYPE_CHECKING:
    from dspark.training.data.endpoint import Endpoint, Retries
    from dspark.training.data.manifest import ForbiddenPrompts
    from dspark.training.data.prompts import PromptSource
    from dspark.training.data.regeneration import DataProgress, DataResult
    from dspark.training.data.settings import DataSettings

ENDPOINT = Group("Endpoint", sort_key=3)
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
            " also `self-math`, `self-code`, `self-chat`), a JSONL file with `turns` or `messages`, or a data set of"
            " the Hugging Face hub, `hub:owner/name[/subset][:split][:column]`."
            " `=SHARE` behind it sets its part of the rows, as in `self=3`.",
        ),
    ] = ("self",),
    forbid: ForbidOption = (),
    target: TargetOption = "embedded",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    endpoint: Annotated[
        str | None,
        Parameter(
            group=ENDPOINT,
            help="Base URL of an OpenAI-compatible server that runs the target, such as `http://localhost:8000/v1`."
            " Of `--target` only the tokenizer is then loaded.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Parameter(group=ENDPOINT, help="The target's name on that server; may be left out where it has only one."),
    ] = None,
    api_key_env: Annotated[
        str | None, Parameter(group=ENDPOINT, help="Environment variable that holds the key, if the server wants one.")
    ] = None,
    endpoint_api: Annotated[
        Literal["completions", "chat"],
        Parameter(
            group=ENDPOINT,
            help="`completions` sends token ids and serves all prompts; `chat` sends messages, for servers without it,"
            " and serves prompts from files and the hub.",
        ),
    ] = "completions",
    endpoint_dialect: Annotated[
        Literal["vllm", "llama.cpp", "openai"],
        Parameter(
            group=ENDPOINT,
            help="Fields that the server knows besides OpenAI's. `vllm` (SGLang too) and `llama.cpp` give token ids;"
            " with `openai` an answer is tokenised from its text, and dropped where that may not be what was drawn.",
        ),
    ] = "vllm",
    endpoint_timeout: Annotated[
        float, Parameter(group=ENDPOINT, help="Seconds to wait for an answer, its time in the server's queue included.")
    ] = 600.0,
    endpoint_tries: Annotated[
        int, Parameter(group=ENDPOINT, help="Tries of a request before the run ends; the waits between them grow.")
    ] = 8,
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
        int,
        Parameter(
            group=RUN,
            help="Rows generated at the same time, or requests under way. More is faster and takes more memory.",
        ),
    ] = 96,
    json: JsonOption = False,
) -> int:
    """Let the target write training data for its drafter.

    A drafter learns to say what its target says, so every answer in the data is the target's own. Prompts come from the
    target too, steered to math, code and chat, or from files. Examples:

    - `dspark data data/first --rows 2000`
    - `dspark data data/mixed --source self=3 --source prompts/gsm8k-train.jsonl --forbid benchmarks/gsm8k.jsonl`
    - `dspark data data/first --rows 8000` goes on with the first one
    - `dspark data data/large --target org/model-70b --endpoint http://localhost:8000/v1`

    `OUT` gets `rows-00000.jsonl` and so on (`token_ids`, and `response_spans`: which of them the target wrote),
    `dropped.jsonl` (rows that came to nothing, with the reason) and `manifest.json` (settings and counts, also printed
    by `--json`). Ctrl-C or a crash loses only the rows that were being written: the same command goes on from there.
    """
    from dspark.cli import EXIT_INTERRUPTED, EXIT_OK
    from dspark.training.data.settings import DataSettings

    if max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {max_concurrency}")
    settings = DataSettings(
        rows=rows,
        seed=seed,
        temperatures=_numbers(temperatures),
        max_answer_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_length=max_length,
        steered_answer_fraction=steered_answers,
    )
    asked: tuple[Endpoint, Retries] | None = None
    if endpoint is not None:
        from dspark.training.data.endpoint import Endpoint, Retries

        asked = (
            Endpoint(
                url=endpoint,
                model=model,
                api=endpoint_api,
                dialect=endpoint_dialect,
                api_key=_api_key(api_key_env),
            ),
            Retries(attempts=endpoint_tries, timeout_s=endpoint_timeout),
        )
    elif model is not None or api_key_env is not None:
        raise ValueError(
            f"--{'model' if model is not None else 'api-key-env'} belongs to an --endpoint, and there is none"
        )

    # Mistakes are found before anything is loaded or asked where possible.
    from dspark.training.data.prompts import parse_sources

    forbidden = _read_forbidden(forbid)
    sources = parse_sources(source)
    announce = _ignore if json else _print
    _announce_unusable(sources, announce)
    with _progress_display(show=not json) as show:
        if asked is None:
            result = _make_rows_here(
                out,
                settings=settings,
                sources=sources,
                forbidden=forbidden,
                target=target,
                dtype=dtype,
                device=device,
                max_concurrency=max_concurrency,
                on_progress=show,
            )
        else:
            result = _make_rows_at_endpoint(
                out,
                settings=settings,
                sources=sources,
                forbidden=forbidden,
                target=target,
                endpoint=asked[0],
                retries=asked[1],
                max_concurrency=max_concurrency,
                on_progress=show,
                announce=announce,
            )
    if json:
        print(jsonlib.dumps({**result.manifest, "interrupted": result.interrupted}))
    else:
        print(_summary(out, result), file=sys.stderr)
    return EXIT_INTERRUPTED if result.interrupted else EXIT_OK


def _make_rows_here(
    out: Path,
    *,
    settings: DataSettings,
    sources: Sequence[PromptSource],
    forbidden: Sequence[ForbiddenPrompts],
    target: str,
    dtype: str,
    device: str,
    max_concurrency: int,
    on_progress: Callable[[DataProgress], None] | None,
) -> DataResult:
    """Load the target and make the rows that ``out`` lacks."""
    from dspark.cli.models import open_target
    from dspark.engine.batch import BatchGenerator
    from dspark.training.data.identity import TargetIdentity
    from dspark.training.data.regeneration import regenerate

    loaded = open_target(target, dtype=dtype, device=device)
    _check_length(settings, loaded.model.config.max_position_embeddings)
    generator = BatchGenerator(
        loaded.model, max_concurrency=min(max_concurrency, settings.rows), max_length=settings.max_length
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


def _make_rows_at_endpoint(
    out: Path,
    *,
    settings: DataSettings,
    sources: Sequence[PromptSource],
    forbidden: Sequence[ForbiddenPrompts],
    target: str,
    endpoint: Endpoint,
    retries: Retries,
    max_concurrency: int,
    on_progress: Callable[[DataProgress], None] | None,
    announce: Callable[[str], None],
) -> DataResult:
    """Load the target's tokenizer and have the endpoint make the rows that ``out`` lacks."""
    from dspark.models.tokenizer import load_tokenizer
    from dspark.training.data.chat import ChatFormat
    from dspark.training.data.endpoint import EndpointGenerator
    from dspark.training.data.identity import TargetIdentity
    from dspark.training.data.prompts import SelfPrompts
    from dspark.training.data.regeneration import regenerate

    if endpoint.api == "chat" and (own := [source.name for source in sources if isinstance(source, SelfPrompts)]):
        raise ValueError(
            f"--endpoint-api chat cannot let the target write user messages, as {own[0]} does; use completions, or "
            "give prompts with --source"
        )
    loaded = load_tokenizer(target)
    _check_length(settings, loaded.max_length)
    generator = EndpointGenerator(
        endpoint,
        tokenizer=loaded.tokenizer,
        end_of_answer_id=ChatFormat(loaded.tokenizer, stop_token_ids=loaded.stop_token_ids).end_of_answer_id,
        vocab_size=loaded.vocab_size,
        max_concurrency=max_concurrency,
        retries=retries,
        on_wait=_Sometimes(announce),
    )
    identity = TargetIdentity(
        name=loaded.name,
        dtype="remote",
        vocab_size=loaded.vocab_size,
        endpoint=generator.connect(max_length=settings.max_length),
    )
    result = regenerate(
        out,
        generate=generator.run,
        tokenizer=loaded.tokenizer,
        target=identity,
        sources=sources,
        settings=settings,
        forbidden=forbidden,
        stop_token_ids=loaded.stop_token_ids,
        on_progress=on_progress,
    )
    if generator.from_text:
        announce(
            f"note: {generator.from_text} texts came without token ids; answers whose tokens were not certain are "
            "dropped as answer_tokens_unknown"
        )
    return result


def _check_length(settings: DataSettings, context: int) -> None:
    if context < settings.max_length:
        raise ValueError(
            f"--max-length is {settings.max_length}, but the target's context is {context} tokens; "
            f"give at most {context}"
        )


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"--api-key-env names {variable}, but no such environment variable is set")
    return key


def _announce_unusable(sources: Sequence[PromptSource], announce: Callable[[str], None]) -> None:
    from dspark.training.data.prompts import FilePrompts

    for source in sources:
        if isinstance(source, FilePrompts) and source.unusable:
            total = source.unusable + len(source.conversations)
            announce(
                f"note: {source.unusable} of the {total} rows read from {source.dataset} have no usable prompt and are "
                "left out"
            )


def _read_forbidden(files: Sequence[Path]) -> list[ForbiddenPrompts]:
    from dspark.training.data.conversations import read_conversations
    from dspark.training.data.manifest import ForbiddenPrompts

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


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _ignore(message: str) -> None:
    pass


class _Sometimes:
    """Passes a message on, at most one every ``SECONDS_BETWEEN_LINES``."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._announced_at: float | None = None

    def __call__(self, message: str) -> None:
        now = time.monotonic()
        if self._announced_at is None or now - self._announced_at >= SECONDS_BETWEEN_LINES:
            self._announced_at = now
            self._announce(message)


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

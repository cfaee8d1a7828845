"""Regeneration: the target writes its own training data.

A row goes through one or more generations: a self-prompted row first lets the target write the user's message, then the
answer; a row from a file has one answer for each user message. All rows share one batched generator, which pulls its
requests from ``_Feed``: a slot of the batch that is free gets the next stage of a row under way, or a new row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.decoding.request import GenerationCompletion, GenerationRequest
from dspark.decoding.settings import SamplingSettings
from dspark.training.data.chat import ChatFormat, ChatTokenizer, Message
from dspark.training.data.conversations import Conversation
from dspark.training.data.identity import TargetIdentity
from dspark.training.data.manifest import (
    ForbiddenPrompts,
    check_same_recipe,
    describe_recipe,
    utc_now,
    write_manifest,
)
from dspark.training.data.near_copy import NearCopyGuard, NearDuplicateIndex
from dspark.training.data.plan import PlannedRow, derived_fraction, derived_seed, plan_rows
from dspark.training.data.prompts import PromptSource, SelfPrompts
from dspark.training.data.rows import DataRow, DroppedRow
from dspark.training.data.settings import DataSettings
from dspark.training.data.store import RowStore

#: Reasons for which a row is dropped. The first five are about user turns that the target wrote, the last is about
#: generators that give text (``GenerationCompletion.exact``).
USER_TURN_UNFINISHED = "user_turn_unfinished"
USER_TURN_SPECIAL_TOKEN = "user_turn_special_token"
USER_TURN_EMPTY = "user_turn_empty"
USER_TURN_NEAR_DUPLICATE = "user_turn_near_duplicate"
FORBIDDEN_PROMPT = "forbidden_prompt"
PROMPT_TOO_LONG = "prompt_too_long"
ANSWER_EMPTY = "answer_empty"
ANSWER_TOKENS_UNKNOWN = "answer_tokens_unknown"
#: Reasons that are found after the row's user turn was taken.
_ANSWER_REASONS = (ANSWER_EMPTY, ANSWER_TOKENS_UNKNOWN)

BatchGenerate = Callable[[Iterator[GenerationRequest | None]], Iterator[GenerationCompletion]]
"""Runs requests in a batch (the engine's ``BatchGenerator.run``; training does not import the engine). It pulls a
request whenever it has room (None: nothing at this moment, ask again after the next completion; end of the iterator: no
more will come) and yields every completion as soon as it is there."""


@dataclass(frozen=True, kw_only=True)
class DataProgress:
    """How far a run is. ``tokens`` counts what this run generated, user turns and dropped rows included."""

    planned: int
    done: int
    rows: int
    dropped: int
    response_tokens: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of this run."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class DataResult:
    """How a run ended: the manifest as written, and whether Ctrl-C ended it."""

    manifest: dict[str, Any]
    interrupted: bool
    progress: DataProgress


def regenerate(
    directory: Path | str,
    *,
    generate: BatchGenerate,
    tokenizer: ChatTokenizer,
    target: TargetIdentity,
    sources: Sequence[PromptSource],
    settings: DataSettings,
    forbidden: Sequence[ForbiddenPrompts] = (),
    stop_token_ids: Iterable[int] = (),
    on_progress: Callable[[DataProgress], None] | None = None,
) -> DataResult:
    """Make the planned rows that ``directory`` does not have yet.

    A conversation ends early, after a whole answer, where its next user turn no longer fits into
    ``settings.max_length``. Rows are appended as they finish, in no particular order. A run that was stopped, by
    whatever, goes on from what is on disk. KeyboardInterrupt ends it in order: what is finished is kept, and the result
    says ``interrupted``.

    generate: batched generator of the target. To be repeatable it must give the same tokens for the same request
        whatever else is in the batch; seeds are in the requests.
    stop_token_ids: tokens that end an answer besides the tokenizer's eos and the template's end-of-turn token.
    on_progress: called after each generation.

    Raises ValueError when the directory holds rows of other settings, when the chat template cannot be used, or when
    no row can be planned; BlockingIOError when another process writes to the directory.
    """
    directory = Path(directory)
    chat = ChatFormat(tokenizer, stop_token_ids=stop_token_ids)
    for source in sources:
        _check_template(chat, source, settings)
    plan = plan_rows(sources, rows=settings.rows, seed=settings.seed)
    recipe = describe_recipe(
        settings=settings,
        sources=sources,
        forbidden=forbidden,
        target=target,
        template_hash=chat.template_hash,
        tokenizer_hash=chat.tokenizer_hash,
    )
    earlier = check_same_recipe(directory, recipe) if directory.exists() else None
    if earlier and "tokenizer_sha256" not in earlier["recipe"]["target"]:
        del recipe["target"]["tokenizer_sha256"]  # which tokenizer made the earlier rows stays unknown
    guard = NearCopyGuard(
        (text for prompts in forbidden for text in prompts.texts), ngram_words=settings.forbidden_ngram_words
    )
    started = time.monotonic()
    interrupted = False

    with RowStore(directory) as store:
        unplanned = store.recovered.keys() - {row.id for row in plan}
        if unplanned:
            raise ValueError(f"{directory} has row {min(unplanned)}, which is not in the plan; take another directory")
        created = earlier["created"] if earlier else utc_now()
        torn_lines = store.torn_lines + (earlier["torn_lines"] if earlier else 0)
        seconds_before = earlier["seconds"] if earlier else 0.0

        def save_manifest() -> dict[str, Any]:
            return write_manifest(
                directory,
                recipe=recipe,
                tally=store.tally,
                planned=len(plan),
                created=created,
                torn_lines=torn_lines,
                seconds=seconds_before + time.monotonic() - started,
            )

        save_manifest()
        feed = _Feed(plan=plan, store=store, chat=chat, settings=settings, guard=guard)
        try:
            for completion in generate(feed):
                feed.take(completion)
                if store.sync_if_due():
                    save_manifest()
                if on_progress is not None:
                    on_progress(_progress(feed, time.monotonic() - started))
        except KeyboardInterrupt:
            interrupted = True
            store.recount()  # it may have come between writing a row and counting it
        except BaseException:
            with suppress(OSError):  # on a full disk the manifest stays older than the rows, which is harmless
                store.sync()
                save_manifest()
            raise
        if not interrupted and store.tally.done != len(plan):
            raise RuntimeError(
                f"the generator ended with {len(plan) - store.tally.done} rows unfinished; run again to go on"
            )
        progress = _progress(feed, time.monotonic() - started)
        if on_progress is not None:
            on_progress(progress)
        store.sync()
        return DataResult(manifest=save_manifest(), interrupted=interrupted, progress=progress)


def _check_template(chat: ChatFormat, source: PromptSource, settings: DataSettings) -> None:
    """Refuse at once what would fail in the middle of a run."""
    if isinstance(source, SelfPrompts):
        longest = max(len(chat.open_user_turn(p.system, opener)) for p in source.steering for opener in p.openers)
        if longest >= settings.max_length:
            raise ValueError(
                f"max_length is {settings.max_length}, but the start of a user turn of {source.name} alone takes "
                f"{longest} tokens"
            )
        return
    if any(len(conversation.user_turns) > 1 for conversation in source.conversations):
        chat.next_answer_prompt([{"role": "user", "content": "Hi"}], "Hi again", last_token=-1)
    with_system = sum(conversation.system is not None for conversation in source.conversations)
    if with_system:
        try:
            chat.check_system_role()
        except ValueError as error:
            raise ValueError(
                f"{with_system} of the {len(source.conversations)} prompts of {source.name} have a system message, but "
                f"{error}; take the system messages out of them, or put their text before the user's"
            ) from error


def _progress(feed: _Feed, seconds: float) -> DataProgress:
    tally = feed.store.tally
    return DataProgress(
        planned=len(feed.plan),
        done=tally.done,
        rows=tally.rows,
        dropped=tally.dropped.total(),
        response_tokens=tally.response_tokens,
        tokens=feed.generated_tokens,
        seconds=seconds,
    )


@dataclass(kw_only=True)
class _RowInProgress:
    """A row between its generations."""

    planned: PlannedRow
    index: int
    temperature: float
    messages: list[Message] = field(default_factory=list)
    turns_to_come: deque[str] = field(default_factory=deque)
    token_ids: list[int] = field(default_factory=list)
    response_spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    writes_user_turn: bool = False

    @property
    def user_turns(self) -> tuple[str, ...]:
        return tuple(message["content"] for message in self.messages if message["role"] == "user")


@dataclass(frozen=True, kw_only=True)
class _Steering:
    """What was drawn for a self-prompted row; ``answers_too``: the answer is given under ``system`` as well."""

    system: str
    opener: str
    closer: str
    answers_too: bool


class _Feed:
    """The iterator that a batched generator pulls from, and the place where its completions go.

    Whether a self-written user turn is a near-duplicate is decided in the order of the plan, against the earlier rows
    only: the decision then does not depend on which generation finished first. A row whose turn comes too early waits.
    """

    def __init__(
        self,
        *,
        plan: Sequence[PlannedRow],
        store: RowStore,
        chat: ChatFormat,
        settings: DataSettings,
        guard: NearCopyGuard,
    ) -> None:
        self.plan = plan
        self.store = store
        self.generated_tokens = 0
        self._chat = chat
        self._settings = settings
        self._guard = guard
        self._next_index = 0  # the first row of the plan that has not been looked at
        self._ready: deque[GenerationRequest] = deque()
        self._running: dict[str, _RowInProgress] = {}
        self._undecided: dict[int, _RowInProgress] = {}
        self._decided_index = 0  # near-duplicates are decided for the rows before this one
        self._dropped_indices: set[int] = set()
        self._seen_turns = NearDuplicateIndex(similarity=settings.near_duplicate_similarity)

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> GenerationRequest | None:
        while not self._ready and self._next_index < len(self.plan):
            self._start_next_row()
        if self._ready:
            return self._ready.popleft()
        if self._running:
            return None
        raise StopIteration

    def take(self, completion: GenerationCompletion) -> None:
        """Take the outcome of a request, and with it bring its row one stage further."""
        if not completion.token_ids:
            raise ValueError(f"the generator gave no token for request {completion.request_id}")
        row = self._running.pop(completion.request_id)
        self.generated_tokens += len(completion.token_ids)
        if row.writes_user_turn:
            self._take_user_turn(row, completion)
        else:
            self._take_answer(row, completion)

    def _start_next_row(self) -> None:
        index = self._next_index
        self._next_index += 1
        planned = self.plan[index]
        if planned.id in self.store.recovered:
            self._decide_near_duplicates()
            return
        choice = derived_fraction(self._settings.seed, planned.id, "temperature")
        temperature = self._settings.temperatures[int(choice * len(self._settings.temperatures))]
        row = _RowInProgress(planned=planned, index=index, temperature=temperature)
        source = planned.source
        if isinstance(source, SelfPrompts):
            row.writes_user_turn = True
            steering = self._steering(planned)
            self._request(row, self._chat.open_user_turn(steering.system, steering.opener))
            return
        self._start_conversation(row, source.conversations[planned.prompt_number])
        self._decide_near_duplicates()

    def _steering(self, planned: PlannedRow) -> _Steering:
        assert isinstance(planned.source, SelfPrompts)

        def draw(purpose: str) -> float:
            return derived_fraction(self._settings.seed, planned.id, purpose)

        prompt = planned.source.pick(draw("system prompt"))
        return _Steering(
            system=prompt.system,
            opener=prompt.openers[int(draw("opener") * len(prompt.openers))],
            closer=prompt.closers[int(draw("closer") * len(prompt.closers))],
            answers_too=draw("steered answer") < self._settings.steered_answer_fraction,
        )

    def _start_conversation(self, row: _RowInProgress, conversation: Conversation) -> None:
        if conversation.system is not None:
            row.messages.append({"role": "system", "content": conversation.system})
        row.messages.append({"role": "user", "content": conversation.user_turns[0]})
        row.turns_to_come.extend(conversation.user_turns[1:])
        prompt_ids = self._chat.answer_prompt(row.messages)
        if any(self._guard.is_near_copy(turn) for turn in conversation.user_turns):
            self._drop(row, FORBIDDEN_PROMPT)
        elif len(prompt_ids) >= self._settings.max_length:
            self._drop(row, PROMPT_TOO_LONG)
        else:
            row.token_ids.extend(prompt_ids)
            self._request(row, row.token_ids)

    def _request(self, row: _RowInProgress, prompt_ids: Sequence[int]) -> None:
        settings = self._settings
        if row.writes_user_turn:
            stage, limit = "user", settings.max_prompt_tokens
            # Any special token ends the turn: only the right one at the end makes it a turn.
            stops = self._chat.special_token_ids | self._chat.stop_token_ids
            temperature, top_p = settings.user_temperature, settings.user_top_p
        else:
            stage, limit = f"answer{len(row.response_spans)}", settings.max_answer_tokens
            stops = self._chat.stop_token_ids
            temperature, top_p = row.temperature, settings.answer_top_p
        request_id = f"{row.planned.id}#{stage}"
        self._running[request_id] = row
        self._ready.append(
            GenerationRequest(
                request_id=request_id,
                prompt_ids=tuple(prompt_ids),
                settings=SamplingSettings(
                    temperature=temperature,
                    top_p=top_p,
                    seed=derived_seed(settings.seed, row.planned.id, stage),
                ),
                max_tokens=min(limit, settings.max_length - len(prompt_ids)),
                stop_token_ids=stops,
                messages=None
                if row.writes_user_turn
                else tuple((message["role"], message["content"]) for message in row.messages),
            )
        )

    def _take_user_turn(self, row: _RowInProgress, completion: GenerationCompletion) -> None:
        row.writes_user_turn = False
        steering = self._steering(row.planned)
        token_ids = list(completion.token_ids)
        ended = completion.finish_reason == "stop"
        written = self._chat.decode(token_ids[:-1] if ended else token_ids)
        text = (steering.opener + written).strip()
        if steering.answers_too:
            row.messages.append({"role": "system", "content": steering.system})
        row.messages.append({"role": "user", "content": text + steering.closer})
        reason: str | None = None
        if not ended:
            reason = USER_TURN_UNFINISHED
        elif token_ids[-1] not in self._chat.end_of_user_turn_ids:
            reason = USER_TURN_SPECIAL_TOKEN
        elif not written.strip():
            reason = USER_TURN_EMPTY
        elif self._guard.is_near_copy(text):
            reason = FORBIDDEN_PROMPT
        else:
            row.token_ids.extend(self._chat.answer_prompt(row.messages))
            if len(row.token_ids) >= self._settings.max_length:
                reason = PROMPT_TOO_LONG
        if reason is None:
            self._undecided[row.index] = row
        else:
            self._drop(row, reason)
        self._decide_near_duplicates()

    def _decide_near_duplicates(self) -> None:
        while self._decided_index < self._next_index:
            index = self._decided_index
            planned = self.plan[index]
            if planned.id in self.store.recovered:
                user_turns, dropped_for = self.store.recovered[planned.id]
                if isinstance(planned.source, SelfPrompts) and (dropped_for is None or dropped_for in _ANSWER_REASONS):
                    self._seen_turns.add(self._own_words(planned, user_turns[0]))
            elif index in self._undecided:
                row = self._undecided.pop(index)
                text = self._own_words(planned, row.user_turns[0])
                if self._seen_turns.is_near_duplicate(text):
                    self._drop(row, USER_TURN_NEAR_DUPLICATE)
                else:
                    self._seen_turns.add(text)
                    self._request(row, row.token_ids)
            elif isinstance(planned.source, SelfPrompts) and index not in self._dropped_indices:
                return  # its user turn is still being written
            self._decided_index += 1

    def _own_words(self, planned: PlannedRow, user_turn: str) -> str:
        """A self-written user turn without the closer, which many share."""
        return user_turn.removesuffix(self._steering(planned).closer)

    def _take_answer(self, row: _RowInProgress, completion: GenerationCompletion) -> None:
        if not completion.exact:
            self._drop(row, ANSWER_TOKENS_UNKNOWN)
            return
        start = len(row.token_ids)
        row.token_ids.extend(completion.token_ids)
        row.response_spans.append((start, len(row.token_ids)))
        row.finish_reasons.append(completion.finish_reason)
        if row.token_ids[start:] == [row.token_ids[-1]] and row.finish_reasons == ["stop"]:
            self._drop(row, ANSWER_EMPTY)
            return
        if row.turns_to_come:
            between = self._chat.next_answer_prompt(row.messages, row.turns_to_come[0], row.token_ids[-1])
            if len(row.token_ids) + len(between) < self._settings.max_length:
                ended = completion.finish_reason == "stop"
                answer = self._chat.decode(completion.token_ids[:-1] if ended else completion.token_ids)
                row.messages.append({"role": "assistant", "content": answer})
                row.messages.append({"role": "user", "content": row.turns_to_come.popleft()})
                row.token_ids.extend(between)
                self._request(row, row.token_ids)
                return
        self.store.append(
            DataRow(
                id=row.planned.id,
                source=row.planned.source.name,
                token_ids=tuple(row.token_ids),
                response_spans=tuple(row.response_spans),
                finish_reasons=tuple(row.finish_reasons),
                temperature=row.temperature,
                user_turns=row.user_turns,
            )
        )

    def _drop(self, row: _RowInProgress, reason: str) -> None:
        self._dropped_indices.add(row.index)
        self.store.append(
            DroppedRow(id=row.planned.id, source=row.planned.source.name, reason=reason, user_turns=row.user_turns)
        )

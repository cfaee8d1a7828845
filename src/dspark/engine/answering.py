"""Many conversations at once, every round of every answer on record: what evaluation and calibration measure with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.drafters.protocol import Drafter
from dspark.engine.core import EngineCore
from dspark.engine.request import Request
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.evaluation.answers import Answer, Timing
from dspark.evaluation.questions import Conversation, DoesNotFit, Question
from dspark.evaluation.rounds import RoundRecord
from dspark.models.chat import chat_token_ids
from dspark.models.loading import LoadedTarget
from dspark.scheduling import Policy, StepRecord
from dspark.scheduling.batch import FloatArray

__all__ = ["answer_conversations", "question_token_ids"]

_PROMPT_TOKENS_PER_STEP = 2048
_LARGEST_LOGIT = 36.0  # as far as confidences in double precision tell logits apart


def answer_conversations(
    conversations: Iterator[Conversation],
    target: LoadedTarget,
    drafter: Drafter | None,
    *,
    policy: Policy,
    concurrency: int,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Lead conversations to their end, ``concurrency`` at a time; each goes on as soon as it has its answer.

    Answers and their rounds do not depend on ``concurrency``, where target and drafter compute batch-invariantly and
    the policy is static: every prompt goes through the target in one piece, nothing of earlier ones is reused, and
    there is memory for all, so that nobody is interrupted.

    The seconds of a step are shared out among its answers, those of drafting and scheduling equally, all others by
    tokens in the target's pass: what an answer cost, not how long it was waited for. Those of a prompt are its
    ``prefill``. With one conversation at a time this is simply its time; always, the seconds of all answers together
    are those that the engine worked.

    Args:
        conversations: pulled one by one as there is room. One that is sent an answer keeps its place.
        max_tokens: of an answer.
        clock: seconds.
    """
    _Run(target, drafter, policy, concurrency, max_tokens, clock).run(conversations)


def question_token_ids(target: LoadedTarget, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> list[int]:
    """The prompt of a conversation. Raises DoesNotFit where the context has no room for a whole answer to it."""
    prompt_ids = chat_token_ids(target.tokenizer, messages)
    context = target.model.config.max_position_embeddings
    if len(prompt_ids) + max_tokens > context:
        raise DoesNotFit(
            f"{len(prompt_ids)} tokens of conversation and {max_tokens} of answer, but the target's context has "
            f"{context}"
        )
    return prompt_ids


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question that waits for a place."""

    conversation: Conversation
    question: Question
    prompt_ids: list[int]


@dataclass(kw_only=True, eq=False)
class _Open:
    """An answer that grows."""

    asked: _Asked
    handle: RequestHandle
    num_known: int = 0  # generated tokens before the step
    rounds: list[RoundRecord] = field(default_factory=list)
    prefill: float = 0.0
    draft: float = 0.0
    schedule: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    def timing(self) -> Timing:
        """Its seconds so far."""
        parts = {name: getattr(self, name) for name in ("prefill", "draft", "schedule", "verify", "commit")}
        return Timing(total=sum(parts.values()), **parts)


class _Run:
    """State of `answer_conversations` between steps."""

    def __init__(
        self,
        target: LoadedTarget,
        drafter: Drafter | None,
        policy: Policy,
        concurrency: int,
        max_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._policy = policy
        self._concurrency = concurrency
        self._max_tokens = max_tokens
        self._clock = clock
        self._core: EngineCore | None = None
        self._records: list[StepRecord] = []
        self._asked: deque[_Asked] = deque()
        self._open: dict[int, _Open] = {}  # by choice id

    def run(self, conversations: Iterator[Conversation]) -> None:
        """Until nobody asks any more."""
        while True:
            self._fill(conversations)
            if not self._open:
                return
            record, seconds = self._step()
            self._share_out(record, seconds)
            self._take_rounds(record)
            for choice_id, one in list(self._open.items()):
                if one.handle.is_finished:
                    del self._open[choice_id]
                    self._go_on(one.asked.conversation, self._answer(one))

    # ---- who is answered ---------------------------------------------------------------------------------------------

    def _fill(self, conversations: Iterator[Conversation]) -> None:
        """Give places that are free to whoever asks next, a limited number of prompt tokens at once."""
        new_tokens = 0
        while len(self._open) < self._concurrency:
            while not self._asked:
                conversation = next(conversations, None)
                if conversation is None:
                    return
                self._go_on(conversation, None)
            asked = self._asked[0]
            new_tokens += len(asked.prompt_ids)
            if new_tokens > max(_PROMPT_TOKENS_PER_STEP, len(asked.prompt_ids)):
                return
            core = self._core_for(len(asked.prompt_ids) + self._max_tokens)
            if core is None:
                return
            self._asked.popleft()
            request = Request(
                prompt_ids=tuple(asked.prompt_ids),
                sampling=asked.question.sampling,
                max_tokens=self._max_tokens,
                stop_token_ids=self._target.stop_token_ids,
                random=asked.question.random,
            )
            handle = core.submit(request)
            self._open[handle.choices[0].choice_id] = _Open(asked=asked, handle=handle)

    def _go_on(self, conversation: Conversation, answer: Answer | None) -> None:
        """Hand a conversation its answer (None: it begins) and take its next question, if there is one."""
        try:
            question = next(conversation) if answer is None else conversation.send(answer)
            while True:
                try:
                    prompt_ids = question_token_ids(self._target, question.messages, max_tokens=self._max_tokens)
                    break
                except DoesNotFit as error:
                    question = conversation.throw(error)
        except StopIteration:
            return
        self._asked.append(_Asked(conversation=conversation, question=question, prompt_ids=prompt_ids))

    def _core_for(self, length: int) -> EngineCore | None:
        """An engine for answers that end at ``length``; None if it has to wait for those that run in a smaller one."""
        if self._core is None or length > self._core.max_length:
            if self._open:
                return None
            context = self._target.model.config.max_position_embeddings
            max_length = min(context, 1 << (length - 1).bit_length())
            settings = EngineSettings(
                max_concurrency=self._concurrency,
                max_length=max_length,
                max_prefill_tokens=max(_PROMPT_TOKENS_PER_STEP, max_length),
                reuse_prefixes=False,
            )
            self._core = None  # its memory goes before there is new
            self._core = EngineCore(
                self._target.model,
                self._drafter,
                policy=self._policy,
                settings=settings,
                on_step=self._records.append,
                clock=self._clock,
            )
        return self._core

    # ---- what came of a step -----------------------------------------------------------------------------------------

    def _step(self) -> tuple[StepRecord, float]:
        """One step of the engine: its record, and the seconds of all of it."""
        assert self._core is not None, "there is an engine where there are requests"
        self._records.clear()
        began = self._clock()
        self._core.step()
        seconds = self._clock() - began
        (record,) = self._records
        return record, seconds

    def _share_out(self, record: StepRecord, seconds: float) -> None:
        """Add the step's seconds to the answers that were in it."""
        measured = record.measured
        assert measured is not None, "the step is over"
        decoding = [self._open[choice_id] for choice_id in record.plan.batch.request_ids_R.tolist()]
        filling = [one for choice_id, one in self._open.items() if one.num_known == 0 and one not in decoding]
        total = len(decoding) + int(record.verify_lengths_R.sum())
        total += sum(len(one.asked.prompt_ids) for one in filling)
        passing = seconds - (measured.drafter + measured.schedule if decoding else 0.0)
        for one, verified in zip(decoding, record.verify_lengths_R.tolist(), strict=True):
            share = (1 + verified) / total
            one.draft += measured.drafter / len(decoding)
            one.schedule += measured.schedule / len(decoding)
            one.verify += share * measured.verify
            one.commit += share * (passing - measured.verify)
        for one in filling:
            one.prefill += passing * len(one.asked.prompt_ids) / total

    def _take_rounds(self, record: StepRecord) -> None:
        """Add the step's rounds to their answers."""
        batch, drafts, accepted_R = record.plan.batch, record.drafts, record.accepted_R
        assert accepted_R is not None, "the step is over"
        for row, choice_id in enumerate(batch.request_ids_R.tolist()):
            one = self._open[choice_id]
            choice = one.handle.choices[0]
            drafted, verified = int(record.plan.draft_lengths_R[row]), int(record.verify_lengths_R[row])
            accepted, committed = int(accepted_R[row]), choice.num_generated - one.num_known
            logits = None
            if drafted > 0 and drafts is not None and drafts.confidences_RG is not None:
                logits = _logits(drafts.confidences_RG[row, :drafted], choice.confidence_temperatures_G[:drafted])
            one.rounds.append(
                RoundRecord(
                    prompt_id=one.asked.question.prompt_id,
                    drafted=drafted,
                    verified=verified,
                    # Where the answer ended before the round's last token, what lies behind is neither.
                    judged=verified if committed == accepted + 1 else committed,
                    accepted=min(accepted, committed),
                    committed=committed,
                    confidence_logits=logits,
                    sampling_temperature=one.asked.question.sampling.temperature,
                )
            )
        for one in self._open.values():
            one.num_known = one.handle.choices[0].num_generated

    def _answer(self, one: _Open) -> Answer:
        assert one.handle.result is not None, "the answer is finished"
        (completion,) = one.handle.result.completions
        text: str = self._target.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return Answer(
            text=text,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            prompt_tokens=one.handle.result.prompt_tokens,
            timing=one.timing(),
            rounds=tuple(one.rounds),
        )


def _logits(confidences_G: FloatArray, temperatures_G: FloatArray) -> tuple[float, ...]:
    """The drafter's float32 logits that these calibrated confidences were made of: the same bits up to about 20."""
    with np.errstate(divide="ignore"):
        logits_G = np.log(confidences_G) - np.log1p(-confidences_G)
    clipped_G = np.clip(logits_G, -_LARGEST_LOGIT, _LARGEST_LOGIT) * temperatures_G
    return tuple(clipped_G.astype(np.float32).tolist())

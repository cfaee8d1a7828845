"""One round over a batch: draft, schedule, verify, commit (SPEC "One round"), with pieces of prompts in the same pass.

Shapes: R decoding choices, G draft tokens of the longest block, N flat tokens of the pass, M rows of logits, V target
ids, D columns of the draft vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from dspark.drafters.cache import DrafterCache
from dspark.drafters.protocol import DraftBlock, Drafter
from dspark.engine.batch_sampling import VerifyRow, draft_sampler, verify_rows
from dspark.engine.choice import Choice
from dspark.engine.grammar import GrammarError
from dspark.engine.grammar_masks import GrammarMasks
from dspark.engine.logprobs import add_prompt_logprobs, logprobs_of
from dspark.engine.request import Delta, TokenLogprob
from dspark.engine.tensors import as_tensor
from dspark.models.target import Target, TargetCache, TargetOutput
from dspark.scheduling import (
    Drafts,
    History,
    Policy,
    StepBatch,
    StepCost,
    StepPlan,
    StepRecord,
    StepSeconds,
    choose_lengths,
    compiled,
    plan_step,
    predicted_seconds,
    rehearse,
)
from dspark.scheduling.batch import FloatArray, IntArray, frozen, frozen_floats, frozen_ints
from dspark.types import Segment


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens of one choice that go through the target: the anchor of a decoding choice, or a piece of a prompt."""

    choice: Choice
    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @property
    def is_sampled(self) -> bool:
        """Whether a token follows: the last known one goes through."""
        return self.end == len(self.choice.tokens)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """What was drafted for one row: nothing, or tokens and the distributions ``[G, D]`` that they were drawn from."""

    tokens: list[int]
    probs_GD: torch.Tensor | None

    def first(self, length: int) -> _Draft:
        """Its first tokens."""
        return _Draft(tokens=self.tokens[:length], probs_GD=None if self.probs_GD is None else self.probs_GD[:length])


_MOST_CAUGHT_UP = 2048
"""Context tokens that a drafter catches up with in one step, of more than one request: some 50 tokens of a prompt cost
as much."""
_NO_DRAFT = _Draft(tokens=[], probs_GD=None)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What a row was given: the draft tokens that were accepted, and one of the target's own.

    With ``is_dead_end`` it cannot go on behind them: its grammar and its bans together leave no token.
    """

    tokens: list[int]
    num_accepted: int
    logprobs: list[TokenLogprob] | None
    is_dead_end: bool


class Stepper:
    """Runs rounds, and keeps what a round needs of those before: caches, survivals and outcomes, the corrected cost.

    Args:
        drafter: None for a target alone; ``policy`` then never drafts.
        cost: what steps cost here; None for policies that do not need it.
        clock: seconds.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        target_cache: TargetCache,
        drafter_cache: DrafterCache | None,
        *,
        policy: Policy,
        cost: StepCost | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._target_cache = target_cache
        self._drafter_cache = drafter_cache
        self._clock = clock
        self._masks = GrammarMasks(target.config.vocab_size)
        self._history = History()
        self._step = 0
        self.policy = policy
        self.cost = cost
        if drafter is not None:
            rehearse(policy, cost)

    @property
    def acceptance_odds_ratio(self) -> float:
        """Odds of draft tokens to be accepted over those by their confidences, as learned so far."""
        return math.exp(self._history.correction.shared)

    def run(self, decoding: Sequence[Row], chunks: Sequence[Row]) -> tuple[StepRecord, list[Delta | None]]:
        """One round of ``decoding``, with ``chunks`` of prompts beside it.

        The caches then hold every known token of a choice but its last.

        Returns:
            What the step was, and what each row got of it, decoding rows first; None where a prompt goes on, or where
            something of the choice's own went wrong (``Choice.error``).
        """
        rows = [*decoding, *chunks]
        began = self._clock()
        plan = plan_step(self.policy, self._batch(decoding, chunks), self._history.past, self.cost)
        planned = self._clock()
        plan, drafting = self._catch_up(plan, decoding)
        caught_up = self._clock()
        drafts, confidences = self._draft(plan, decoding, drafting)
        drafted = self._clock()
        lengths_R, predicted = self._schedule(plan, confidences)
        scheduled = self._clock()
        verified = [draft.first(length) for draft, length in zip(drafts, lengths_R.tolist(), strict=True)]
        verified += [_NO_DRAFT] * len(chunks)
        output = self._verify(rows, verified)
        outcomes = self._accept(rows, verified, output)
        self._roll_back(rows, outcomes)
        deltas = self._commit(rows, verified, outcomes, plan)
        ended = self._clock()

        measured = StepSeconds(
            catch_up=caught_up - planned,
            draft=drafted - caught_up,
            schedule=(planned - began) + (scheduled - drafted),
            verify=ended - scheduled,
        )
        if self.cost is not None and predicted is not None:
            self.cost = self.cost.corrected(predicted, measured)
        accepted_R = np.array(
            [0 if outcome is None else outcome.num_accepted for outcome in outcomes[: len(decoding)]], np.int64
        )
        self._history = self._history.after(confidences, lengths_R, accepted_R)
        self._step += 1
        record = StepRecord(
            policy=self.policy.name,
            plan=plan,
            drafts=confidences,
            verify_lengths_R=lengths_R,
            predicted=predicted,
            measured=measured,
            accepted_R=accepted_R,
        )
        return record, deltas

    def _batch(self, decoding: Sequence[Row], chunks: Sequence[Row]) -> StepBatch:
        """What the scheduler plans by; its requests are the engine's choices."""
        own_policies_R = tuple(row.choice.request.policy for row in decoding)
        return StepBatch(
            step=self._step,
            request_ids_R=np.array([row.choice.choice_id for row in decoding], np.int64),
            # A drafter reads the context before the anchor: without any there is nothing to draft from.
            draftable_R=np.array([row.choice.draftable if row.start > 0 else 0 for row in decoding], np.int64),
            context_tokens=sum(row.start for row in decoding),
            prefill_tokens=sum(row.length for row in chunks),
            own_policies_R=own_policies_R if any(own_policies_R) else None,
        )

    def _catch_up(self, plan: StepPlan, decoding: Sequence[Row]) -> tuple[StepPlan, list[int]]:
        """Have the drafter read what it put off of the contexts that it is to draft from.

        That is spread over steps: those of whom most is unread wait for the next one.

        Returns:
            The plan without the drafts that wait, and the decoding rows that are drafted for.
        """
        drafting = [index for index, length in enumerate(plan.draft_lengths_R.tolist()) if length > 0]
        if not drafting or self._drafter is None or self._drafter_cache is None:
            return plan, drafting
        behind = {index: self._drafter_cache.num_behind(decoding[index].slot) for index in drafting}
        if sum(behind.values()) > _MOST_CAUGHT_UP:
            order = sorted(drafting, key=behind.__getitem__)
            read = accumulate(behind[index] for index in order)
            ready = {index for index, tokens in zip(order, read, strict=True) if tokens <= _MOST_CAUGHT_UP}
            drafting = [index for index in drafting if index in ready] or order[:1]
            lengths_R = np.zeros_like(plan.draft_lengths_R)
            lengths_R[drafting] = plan.draft_lengths_R[drafting]
            plan = replace(plan, draft_lengths_R=lengths_R)
        self._drafter.catch_up(self._drafter_cache, [decoding[index].slot for index in drafting])
        return plan, drafting

    def _draft(
        self, plan: StepPlan, decoding: Sequence[Row], drafting: Sequence[int]
    ) -> tuple[list[_Draft], Drafts | None]:
        """The drafts of the decoding rows, and how sure the drafter is of them; None if nothing was drafted.

        Args:
            drafting: the rows that are drafted for.
        """
        if not drafting:
            return [_NO_DRAFT] * len(decoding), None
        assert self._drafter is not None, "a policy drafts without a drafter"
        assert self._drafter_cache is not None, "a drafter comes with its memory"
        lengths = plan.draft_lengths_R.tolist()
        choices = [decoding[index].choice for index in drafting]
        anchors_R = as_tensor([choice.tokens[-1] for choice in choices], self._target.device)
        block = self._drafter.propose(
            self._drafter_cache,
            [decoding[index].slot for index in drafting],
            anchors_R,
            draft_sampler([choice.sampling for choice in choices], [lengths[index] for index in drafting]),
            max(lengths),
        )
        drafts = [_NO_DRAFT] * len(decoding)
        for place, (index, tokens) in enumerate(zip(drafting, block.tokens_RG.tolist(), strict=True)):
            probs_GD = None if block.probs_RGD is None else block.probs_RGD[place]
            drafts[index] = _Draft(tokens=tokens, probs_GD=probs_GD).first(lengths[index])
        confidences = Drafts(
            step=plan.batch.step,
            request_ids_R=plan.batch.request_ids_R,
            lengths_R=plan.draft_lengths_R,
            confidences_RG=_confidences(block, choices, drafting, len(decoding)),
        )
        return drafts, confidences

    def _schedule(self, plan: StepPlan, confidences: Drafts | None) -> tuple[IntArray, StepSeconds | None]:
        """Draft tokens of each decoding row to verify, and what the step is then expected to take."""
        lengths_R: IntArray = np.zeros_like(plan.draft_lengths_R)
        if confidences is not None:
            lengths_R = choose_lengths(self.policy, plan, confidences, self.cost)
        return lengths_R, None if self.cost is None else predicted_seconds(plan, int(lengths_R.sum()), self.cost)

    def _verify(self, rows: Sequence[Row], verified: Sequence[_Draft]) -> TargetOutput:
        """The target's pass over all rows, which the drafter's context follows.

        Its logits are those of the sampled rows, one after the last known token and one after each draft token.
        """
        tokens: list[int] = []
        segments: list[Segment] = []
        logit_rows: list[int] = []
        for row, draft in zip(rows, verified, strict=True):
            tokens += row.choice.tokens[row.start : row.end]
            tokens += draft.tokens
            segments.append(Segment(row.slot, row.start, row.length + len(draft.tokens)))
            if row.is_sampled:
                logit_rows += range(len(tokens) - 1 - len(draft.tokens), len(tokens))
        tokens_N = as_tensor(tokens, self._target.device)
        tap_layers = () if self._drafter is None else self._drafter.tap_layers
        output = self._target.forward(tokens_N, segments, self._target_cache, tap_layers, logit_rows)
        if self._drafter is not None and self._drafter_cache is not None and output.taps_NT is not None:
            self._drafter.extend(self._drafter_cache, segments, tokens_N, output.taps_NT)
        if any(row.choice.wants_prompt_logprobs for row in rows):
            hidden_of_rows = output.hidden_NH.split([segment.length for segment in segments])
            for row, hidden_LH in zip(rows, hidden_of_rows, strict=True):
                if row.choice.wants_prompt_logprobs:
                    add_prompt_logprobs(row.choice, row.start, hidden_LH, self._target)
        return output

    def _accept(self, rows: Sequence[Row], verified: Sequence[_Draft], output: TargetOutput) -> list[_Outcome | None]:
        """What each row gets by its rule of acceptance, with log-probabilities where asked for; None if unsampled."""
        outcomes: list[_Outcome | None] = [None] * len(rows)
        logits_MV = output.logits_MV
        if logits_MV is None:
            return outcomes
        sampled = [index for index, row in enumerate(rows) if row.is_sampled]
        choices = [rows[index].choice for index in sampled]
        verify = [
            VerifyRow(
                sampling=rows[index].choice.sampling,
                draft_tokens=verified[index].tokens,
                draft_probs_LD=verified[index].probs_GD,
            )
            for index in sampled
        ]
        masked_MV, best_M, empty_rows = logits_MV, output.best_M, dict[int, int]()
        if any(choice.grammar is not None for choice in choices):
            masked_MV, empty_rows = self._masks.apply(choices, [row.draft_tokens for row in verify], logits_MV)
            best_M = None  # of the logits without masks
        first = 0
        for index, acceptance in zip(sampled, verify_rows(verify, masked_MV, best_M), strict=True):
            choice = rows[index].choice
            tokens = [*verified[index].tokens[: acceptance.num_accepted], acceptance.next_token]
            empty_row = empty_rows.get(choice.choice_id, len(tokens))
            is_dead_end = empty_row < len(tokens)
            tokens = tokens[:empty_row]
            top = choice.request.logprobs
            logprobs = None if top is None else logprobs_of(logits_MV[first : first + len(tokens)], tokens, top)
            outcomes[index] = _Outcome(
                tokens=tokens, num_accepted=acceptance.num_accepted, logprobs=logprobs, is_dead_end=is_dead_end
            )
            first += 1 + len(verified[index].tokens)
        return outcomes

    def _roll_back(self, rows: Sequence[Row], outcomes: Sequence[_Outcome | None]) -> None:
        """Forget what was rejected, in both caches."""
        for row, outcome in zip(rows, outcomes, strict=True):
            length = row.end if outcome is None else row.end + outcome.num_accepted
            self._target_cache.truncate(row.slot, length)
            if self._drafter_cache is not None:
                self._drafter_cache.truncate(row.slot, length)

    def _commit(
        self, rows: Sequence[Row], verified: Sequence[_Draft], outcomes: Sequence[_Outcome | None], plan: StepPlan
    ) -> list[Delta | None]:
        """Add what they were given to the choices, up to where they end."""
        deltas: list[Delta | None] = []
        for index, (row, draft, outcome) in enumerate(zip(rows, verified, outcomes, strict=True)):
            if outcome is None:
                deltas.append(None)
                continue
            try:
                delta = row.choice.append(outcome.tokens, outcome.logprobs)
                if outcome.is_dead_end and delta.finish_reason is None:
                    raise GrammarError("grammar and logit_bias together allow no token here")
            except Exception as error:  # of its own: the others of the batch know nothing of it
                row.choice.error = error
                deltas.append(None)
                continue
            if index < plan.batch.num_requests and row.start > 0:  # a prompt of one token has its own pass here
                row.choice.rounds.add(
                    drafted=int(plan.draft_lengths_R[index]),
                    verified=len(draft.tokens),
                    accepted=outcome.num_accepted,
                    committed=len(outcome.tokens),
                    kept=len(delta.token_ids),
                )
            deltas.append(delta)
        return deltas


def _confidences(
    block: DraftBlock, choices: Sequence[Choice], drafting: Sequence[int], num_rows: int
) -> FloatArray | None:
    """Calibrated confidences of all decoding rows, ``[R, G]``; 0 where nothing was drafted."""
    if block.confidence_logits_RG is None:
        return None
    logits = block.confidence_logits_RG
    if not (logits.is_cpu and logits.dtype == torch.float32):
        logits = logits.float().cpu()
    drafted, width = logits.shape
    temperatures_XG = np.array([choice.confidence_temperatures_G[:width] for choice in choices], np.float64)
    if temperatures_XG.shape != (drafted, width):
        raise ValueError(f"the drafter's calibration has {temperatures_XG.shape[-1]} temperatures for {width} tokens")
    confidences_RG = np.zeros((num_rows, width))
    compiled.confidences(
        logits.contiguous().numpy(), frozen_floats(temperatures_XG), frozen_ints(drafting), confidences_RG
    )
    return frozen(confidences_RG)

"""A table drafter that says how sure it is, and requests for it in all their variety."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from dspark.decoding import SamplingSettings
from dspark.drafters.cache import DrafterCache
from dspark.drafters.protocol import DraftBlock, DraftSampler
from dspark.engine.request import Request
from dspark.scheduling import MeasuredCurve, StepCost
from tests.engine.table_models import STATES, TableDrafter, TableTarget, random_table

VOCABULARY = 6
CONTEXT = 120


class ConfidentTableDrafter(TableDrafter):
    """Its confidence in a token depends on the tokens before it, as eq. 7 wants, and is often wrong."""

    def __init__(self, table_SD: torch.Tensor, block_size: int) -> None:
        super().__init__(table_SD, block_size)
        self.has_confidence_head = True

    def propose(
        self,
        cache: DrafterCache,
        slots: Sequence[int],
        anchors_R: torch.Tensor,
        sample: DraftSampler,
        num_tokens: int | None = None,
    ) -> DraftBlock:
        block = super().propose(cache, slots, anchors_R, sample, num_tokens)
        known_RG = torch.cat([anchors_R[:, None], block.tokens_RG[:, :-1]], dim=1)
        logits_RG = (known_RG.cumsum(dim=1) % STATES).float() - 2.0
        return DraftBlock(tokens_RG=block.tokens_RG, probs_RGD=block.probs_RGD, confidence_logits_RG=logits_RG)


def make_target() -> TableTarget:
    """A target of `CONTEXT` tokens."""
    return TableTarget(random_table(VOCABULARY, 0), context=CONTEXT)


def make_drafter(block_size: int = 3) -> ConfidentTableDrafter:
    """It often agrees with the target of `make_target`."""
    near = (random_table(VOCABULARY, 0) + 0.3 * random_table(VOCABULARY, 1)) / 1.3
    return ConfidentTableDrafter(near, block_size)


def make_cost() -> StepCost:
    """A step costs more with every token beyond three, so that a scheduler has something to decide."""
    tokens = (1, 3, 4, 8, 64, 512)
    return StepCost(
        verify=MeasuredCurve(sizes=tokens, seconds=(1.0, 1.05, 1.3, 1.9, 9.0, 70.0)),
        draft={3: MeasuredCurve(sizes=(1, 64), seconds=(0.1, 0.9))},
        prefill=MeasuredCurve(sizes=(1, 64), seconds=(0.1, 3.0)),
    )


def make_request(seed: int, *, most_tokens: int = 40) -> Request:
    """A greedy or seeded request, so that its answer is known from a run alone."""
    draw = random.Random(seed)
    shared = [4, 1, 3, 2, 5] * 12 if draw.random() < 0.5 else []
    prompt = shared[: draw.randrange(1, 61)] + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))]
    sampling = SamplingSettings(
        temperature=draw.choice([0.0, 0.7, 1.2]),
        top_k=draw.choice([None, None, 3]),
        top_p=draw.choice([1.0, 1.0, 0.8]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.4]),
        logit_bias=draw.choice([{}, {}, {2: 1.5}]),
        seed=draw.randrange(10**6),
    )
    return Request(
        prompt_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=draw.randrange(1, most_tokens),
        stop_token_ids=draw.choice([frozenset(), frozenset({5})]),
        n=draw.choice([1, 1, 1, 3]),
        logprobs=draw.choice([None, None, 0, 2]),
        max_draft_tokens=draw.choice([None, None, 0, 1]),
        user=draw.choice(["", "a", "b"]),
        prefix_namespace=draw.choice(["", "x"]),
    )

"""Many requests at once get what each gets alone, and alone they get what the acceptance rules say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.decoding import (
    Acceptance,
    SamplingSettings,
    TokenHistory,
    accept_coupled,
    accept_greedy,
    accept_speculative,
    coupled_sample,
    gumbel_noise,
    sample_from,
    token_probs,
)
from dspark.engine import batch_sampling
from dspark.engine.batch_sampling import VerifyRow, draft_sampler, token_logprobs, verify_rows
from dspark.engine.sampling import RequestSampling

VOCABULARY = 512
COLUMNS = torch.arange(0, VOCABULARY, 2)
PROMPT = [3, 1, 4, 1, 5]
MOST_DRAFTED = 3

CHOICES = [
    SamplingSettings(),
    SamplingSettings(top_k=3, seed=4),  # greedy all the same
    SamplingSettings(repetition_penalty=1.5, logit_bias={6: 3.0}),
    SamplingSettings(temperature=1.0),
    SamplingSettings(temperature=0.7),
    SamplingSettings(temperature=1.0, top_p=0.9),
    SamplingSettings(temperature=1.2, top_k=20, min_p=0.05),
    SamplingSettings(temperature=1.0, logit_bias={8: 4.0, 2: -math.inf}),
    SamplingSettings(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingSettings(temperature=1.0, seed=1),
    SamplingSettings(temperature=1.0, seed=-2),
    SamplingSettings(temperature=0.8, top_p=0.8, repetition_penalty=1.2, seed=3),
    SamplingSettings(temperature=1.0, logit_bias={int(c): -math.inf for c in COLUMNS}),  # nothing left to draft
]
P_Q = [choice for choice in CHOICES if not choice.is_greedy and choice.seed is None]
OTHERS = [choice for choice in CHOICES if choice not in P_Q]


def sampling(choice: SamplingSettings, columns_D: Tensor | None, number: int) -> RequestSampling:
    random = np.random.default_rng(number).random
    return RequestSampling(choice, PROMPT, columns_D, random)


def random_logits(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3


def target_of(logits_GD: Tensor, columns_D: Tensor | None, seed: int) -> Tensor:
    """Target logits of a block that agrees with its drafter often, but not always."""
    logits_RV = random_logits(len(logits_GD) + 1, VOCABULARY, seed)
    columns = slice(None) if columns_D is None else columns_D
    logits_RV[:-1, columns] = logits_GD + 0.2 * logits_RV[:-1, columns]
    return logits_RV


def draft(
    rows: Sequence[RequestSampling], logits_RGD: Tensor, columns_D: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Drafted target ids ``[R, G]`` and their distributions, as a drafter makes them."""
    sample = draft_sampler(rows, [logits_RGD.shape[1]] * len(rows))
    tokens_RG = torch.empty(len(rows), 0, dtype=torch.long)
    distributions = []
    for k in range(logits_RGD.shape[1]):
        columns_R, probs_RD = sample(k, logits_RGD[:, k], tokens_RG)
        drawn_R = columns_R if columns_D is None else columns_D[columns_R]
        tokens_RG = torch.cat([tokens_RG, drawn_R[:, None]], dim=1)
        distributions.append(probs_RD)
    if distributions[0] is None:
        assert all(probs_RD is None for probs_RD in distributions)
        return tokens_RG, None
    return tokens_RG, torch.stack([probs_RD for probs_RD in distributions if probs_RD is not None], dim=1)


@given(
    choices=st.lists(st.sampled_from(CHOICES), min_size=1, max_size=8),
    lengths=st.lists(st.integers(0, MOST_DRAFTED), min_size=8, max_size=8),
    is_reduced=st.booleans(),
    knows_best=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_each_row_gets_what_it_gets_alone(
    choices: list[SamplingSettings], lengths: list[int], is_reduced: bool, knows_best: bool, seed: int
) -> None:
    """Two rounds, so that positions, histories and random numbers have to be right as well."""
    columns_D = COLUMNS if is_reduced else None
    num_columns = len(COLUMNS) if is_reduced else VOCABULARY
    batch = [sampling(choice, columns_D, number) for number, choice in enumerate(choices)]
    alone = [sampling(choice, columns_D, number) for number, choice in enumerate(choices)]
    lengths = lengths[: len(choices)]
    for turn in (0, 1):
        logits_RGD = random_logits(len(batch) * MOST_DRAFTED, num_columns, seed + turn)
        logits_RGD = logits_RGD.view(len(batch), MOST_DRAFTED, num_columns)
        tokens_RG, probs_RGD = draft(batch, logits_RGD, columns_D)
        rows, single_rows, logits = [], [], []
        for r, length in enumerate(lengths):
            single_tokens, single_probs = draft([alone[r]], logits_RGD[r : r + 1], columns_D)
            assert tokens_RG[r].tolist() == single_tokens[0].tolist()
            if single_probs is not None:
                assert probs_RGD is not None
                assert torch.equal(probs_RGD[r], single_probs[0])
            drafts = tokens_RG[r, :length].tolist()
            probs_LD = None if single_probs is None else single_probs[0, :length]
            rows.append(VerifyRow(sampling=batch[r], draft_tokens=drafts, draft_probs_LD=probs_LD))
            single_rows.append(VerifyRow(sampling=alone[r], draft_tokens=drafts, draft_probs_LD=probs_LD))
            logits.append(target_of(logits_RGD[r, :length], columns_D, seed + r))
        logits_NV = torch.cat(logits)
        accepted = verify_rows(rows, logits_NV, logits_NV.argmax(dim=-1) if knows_best else None)
        assert accepted == [verify_rows([row], part)[0] for row, part in zip(single_rows, logits, strict=True)]
        for r, acceptance in enumerate(accepted):
            committed = [*rows[r].draft_tokens[: acceptance.num_accepted], acceptance.next_token]
            batch[r].commit(committed)
            alone[r].commit(committed)


@pytest.mark.parametrize("others", [[], [SamplingSettings(temperature=1.0, top_p=0.9)]])
def test_a_row_draws_no_more_numbers_than_it_wants_tokens(others: list[SamplingSettings]) -> None:
    """In one batch with longer drafts, whether all go by temperature alone or not."""
    choices = [SamplingSettings(temperature=1.0), SamplingSettings(temperature=0.7), SamplingSettings(), *others]
    rows = [sampling(choice, None, number) for number, choice in enumerate(choices)]
    lengths = [1, 4, 2, *[3] * len(others)]
    sample = draft_sampler(rows, lengths)
    logits_RGD = random_logits(len(rows) * 4, VOCABULARY, 0).view(len(rows), 4, VOCABULARY)
    tokens_RG = torch.empty(len(rows), 0, dtype=torch.long)
    for k in range(4):
        columns_R, _ = sample(k, logits_RGD[:, k], tokens_RG)
        tokens_RG = torch.cat([tokens_RG, columns_R[:, None]], dim=1)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        fresh = np.random.default_rng(number)
        fresh.random(0 if row.rule == "greedy" else length)
        assert row.random() == fresh.random()


def expected_draft(
    choice: SamplingSettings, logits_D: Tensor, history: TokenHistory, columns_D: Tensor, position: int, uniform: float
) -> tuple[int, Tensor]:
    probs_D = token_probs(logits_D, choice, history, columns_D)
    if choice.is_greedy:
        return int(probs_D.argmax()), probs_D
    if choice.seed is not None:
        return coupled_sample(probs_D, gumbel_noise(choice.seed, position, VOCABULARY)[columns_D]), probs_D
    return sample_from(probs_D, uniform), probs_D


def expected_acceptance(
    choice: SamplingSettings,
    logits_RV: Tensor,
    history: TokenHistory,
    drafts: list[int],
    draft_probs_LD: Tensor,
    position: int,
    uniforms: list[float],
) -> Acceptance:
    probs_RV = token_probs(logits_RV, choice, history.after_each(drafts))
    if choice.is_greedy:
        return accept_greedy(drafts, probs_RV.argmax(-1))
    if choice.seed is not None:
        noise = [gumbel_noise(choice.seed, position + k, VOCABULARY) for k in range(len(drafts) + 1)]
        samples = [coupled_sample(p_V, noise_V) for p_V, noise_V in zip(probs_RV, noise, strict=True)]
        return accept_coupled(drafts, samples)
    return accept_speculative(drafts, probs_RV, draft_probs_LD, uniforms[:-1], uniforms[-1], COLUMNS)


@pytest.mark.parametrize("choice", CHOICES[:-1], ids=str)
def test_one_request_follows_its_rule(choice: SamplingSettings) -> None:
    """Against the pure functions, written out for one request; which random numbers are read when included."""
    accepted = set()
    for seed in range(12):
        row = sampling(choice, COLUMNS, seed)
        uniforms = np.random.default_rng(seed).random(100).tolist()
        history, position = TokenHistory(PROMPT), len(PROMPT)
        for turn in range(2):
            logits_GD = random_logits(MOST_DRAFTED, len(COLUMNS), 10 * seed + turn)
            tokens_RG, probs_RGD = draft([row], logits_GD[None], COLUMNS)
            drafts: list[int] = []
            expected_probs = []
            for k in range(MOST_DRAFTED):
                uniform = uniforms.pop(0) if choice in P_Q else 0.0
                column, probs_D = expected_draft(
                    choice, logits_GD[k], history.after(drafts), COLUMNS, position + k, uniform
                )
                drafts.append(int(COLUMNS[column]))
                expected_probs.append(probs_D)
            assert tokens_RG[0].tolist() == drafts
            assert (probs_RGD is None) == (choice not in P_Q)
            if probs_RGD is not None:
                assert torch.equal(probs_RGD[0], torch.stack(expected_probs))
            logits_RV = target_of(logits_GD, COLUMNS, seed)
            probs_LD = None if probs_RGD is None else probs_RGD[0]
            (acceptance,) = verify_rows(
                [VerifyRow(sampling=row, draft_tokens=drafts, draft_probs_LD=probs_LD)], logits_RV
            )
            numbers = [uniforms.pop(0) for _ in range(MOST_DRAFTED + 1)] if choice in P_Q else []
            assert acceptance == expected_acceptance(
                choice, logits_RV, history, drafts, torch.stack(expected_probs), position, numbers
            )
            accepted.add(acceptance.num_accepted)
            committed = [*drafts[: acceptance.num_accepted], acceptance.next_token]
            row.commit(committed)
            history.extend(committed)
            position += len(committed)
    assert len(accepted) > 1  # the cases are not all alike


def test_distributions_only_where_a_row_needs_them() -> None:
    others = [sampling(choice, COLUMNS, 0) for choice in OTHERS]
    logits_RD = random_logits(len(others) + 1, len(COLUMNS), 0)
    nothing = torch.empty(len(others) + 1, 0, dtype=torch.long)
    assert draft_sampler(others, [9] * len(others))(0, logits_RD[1:], nothing[1:])[1] is None
    rows = [sampling(P_Q[0], COLUMNS, 0), *others]
    columns_R, probs_RD = draft_sampler(rows, [9] * len(rows))(0, logits_RD, nothing)
    assert probs_RD is not None
    assert probs_RD[0, columns_R[0]] > 0
    assert probs_RD[0].sum() == pytest.approx(1)
    assert not probs_RD[1:].any()


def test_large_batches_are_verified_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of different sizes, among them rows that alone are larger than a piece should be."""
    lengths = [0, 3, 1, 0, 0, 2, 3, 0]
    logits_NV = random_logits(sum(lengths) + len(lengths), VOCABULARY, 0)
    results = []
    for size in (2**21, 2 * VOCABULARY, 1):
        monkeypatch.setattr(batch_sampling, "_PIECE", size)
        rows = [
            VerifyRow(
                sampling=sampling(P_Q[r % 2], None, r),
                draft_tokens=list(range(length)),
                draft_probs_LD=torch.full((length, VOCABULARY), 1 / VOCABULARY),
            )
            for r, length in enumerate(lengths)
        ]
        results.append(verify_rows(rows, logits_NV))
    assert results[0] == results[1] == results[2]


def test_no_rows() -> None:
    assert verify_rows([], torch.empty(0, VOCABULARY)) == []


def test_the_seed_is_a_requests_own_although_requests_are_computed_together() -> None:
    """Rows that differ in nothing but the seed are one group; equal seeds give equal tokens."""
    rows = [sampling(SamplingSettings(temperature=3.0, seed=seed), None, 0) for seed in (1, 2, 3, 1)]
    assert len({row.together for row in rows}) == 1
    logits_RV = random_logits(1, VOCABULARY, 0).expand(4, -1)
    plain = [VerifyRow(sampling=row, draft_tokens=[], draft_probs_LD=None) for row in rows]
    tokens = [acceptance.next_token for acceptance in verify_rows(plain, logits_RV)]
    assert tokens[0] == tokens[3]
    assert len(set(tokens)) == 3


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [(1, VOCABULARY, "logits_NV has shape"), (2, VOCABULARY, "draft_probs_LD is None")],
)
def test_broken_contracts(rows: int, columns: int, message: str) -> None:
    row = VerifyRow(sampling=sampling(P_Q[0], COLUMNS, 0), draft_tokens=[2], draft_probs_LD=None)
    with pytest.raises(ValueError, match=message):
        verify_rows([row], torch.zeros(rows, columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 5, VOCABULARY, VOCABULARY + 1])
def test_token_logprobs(top: int, dtype: torch.dtype) -> None:
    logits_NV = random_logits(3, VOCABULARY, 1).to(dtype)  # many ties in bfloat16
    tokens_N = torch.tensor([5, 0, 511])
    chosen_N, ids_NK, values_NK = token_logprobs(logits_NV, tokens_N, top)
    expected_NV = logits_NV.double().log_softmax(-1)
    torch.testing.assert_close(chosen_N.double(), expected_NV[torch.arange(3), tokens_N], atol=1e-5, rtol=0)
    ordered_NV = expected_NV.sort(dim=-1, descending=True).values[:, :top]
    torch.testing.assert_close(values_NK.double(), ordered_NV, atol=1e-5, rtol=0)
    assert torch.equal(values_NK, logits_NV.float().log_softmax(-1).gather(-1, ids_NK))
    for ids, values in zip(ids_NK.tolist(), values_NK.tolist(), strict=True):
        assert list(zip(values, ids, strict=True)) == sorted(zip(values, ids, strict=True), key=lambda x: (-x[0], x[1]))


def test_negative_number_of_logprobs() -> None:
    with pytest.raises(ValueError, match="top is -1"):
        token_logprobs(torch.zeros(1, 4), torch.tensor([0]), -1)

"""Against transformers where it has the transform, against plain formulas elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.decoding import SamplingSettings, TokenHistory, token_probs, warp_logits

INFINITY = math.inf


def random_logits(seed: int, rows: int, columns: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator) * scale


def transformers_probs(logits_NV: Tensor, token_ids: list[int], **fields: float) -> Tensor:
    processors = LogitsProcessorList()
    if "logit_bias" in fields:
        processors.append(SequenceBiasLogitsProcessor({(t,): float(b) for t, b in fields["logit_bias"].items()}))
    if "repetition_penalty" in fields:
        processors.append(RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(float(fields.get("temperature", 1.0))))
    if "top_k" in fields:
        processors.append(TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        processors.append(TopPLogitsWarper(fields["top_p"]))
    if "min_p" in fields:
        processors.append(MinPLogitsWarper(fields["min_p"]))
    input_ids = torch.tensor([token_ids] * len(logits_NV))
    return processors(input_ids, logits_NV.clone()).softmax(dim=-1)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 1.9},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.6},
        {"logit_bias": {3: 4.0, 90: -5.0}},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 60, "min_p": 0.1},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1},
        {
            "temperature": 1.3,
            "top_k": 50,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.2,
            "logit_bias": {3: 2.0},
        },
    ],
)
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_equals_transformers(fields: dict, scale: float) -> None:
    logits_NV = random_logits(1, 6, 300, scale)
    prompt, output = [3, 17, 3, 299], [17, 200, 5]
    history = TokenHistory(prompt)
    history.extend(output)
    ours = token_probs(logits_NV, SamplingSettings(**{"temperature": 1.0, **fields}), history)
    theirs = transformers_probs(logits_NV, prompt + output, **fields)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 13),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.25, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_ties_are_as_in_transformers_but_for_which_of_equal_tokens_top_p_keeps(
    values: list[int], temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    """Integer logits tie often. Kept probabilities agree as multisets; of equal tokens ours keeps the lowest ids."""
    logits_1V = torch.tensor([values], dtype=torch.float64)
    fields = {"temperature": temperature, "top_p": top_p, "min_p": min_p} | ({"top_k": top_k} if top_k else {})
    ours_V = token_probs(logits_1V, SamplingSettings(**fields))[0]
    theirs_V = transformers_probs(logits_1V, [0], **fields)[0]
    boundary = top_p_boundary_is_rounding(logits_1V / temperature, top_k, top_p)
    if not boundary:
        torch.testing.assert_close(ours_V.sort().values, theirs_V.sort().values, rtol=1e-12, atol=1e-15)
    kept_V = ours_V > 0
    for value in set(values):
        kept_of_value = kept_V[logits_1V[0] == value].tolist()
        assert kept_of_value == sorted(kept_of_value, reverse=True)


def top_p_boundary_is_rounding(scores_1V: Tensor, top_k: int | None, top_p: float) -> bool:
    """Whether some head of the distribution has top_p of the mass up to rounding, so that either answer is right."""
    scores_V = scores_1V[0].sort(descending=True).values
    if top_k is not None:
        scores_V = scores_V[scores_V >= scores_V[min(top_k, len(scores_V)) - 1]]
    return bool(((scores_V.softmax(dim=-1).cumsum(dim=-1) - top_p).abs() < 1e-12).any())


def test_top_k_keeps_ties_with_the_last() -> None:
    probs = token_probs(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]), SamplingSettings(temperature=1.0, top_k=2))
    assert (probs > 0).tolist() == [False, True, True, True, False]


def test_top_p_splits_ties_by_the_lowest_id_and_stops_at_an_exact_boundary() -> None:
    logits = torch.zeros(8)
    for top_p, size in [(0.5, 4), (0.5001, 5), (0.125, 1), (1e-9, 1), (1 - 1e-9, 8)]:
        probs = token_probs(logits, SamplingSettings(temperature=1.0, top_p=top_p))
        assert probs.tolist() == pytest.approx([1 / size] * size + [0] * (8 - size))


def test_top_p_is_of_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert (token_probs(logits, SamplingSettings(temperature=1.0, top_p=0.6)) > 0).sum() == 2
    probs = token_probs(logits, SamplingSettings(temperature=1.0, top_k=2, top_p=0.56))
    assert probs.tolist() == pytest.approx([1, 0, 0, 0])  # 0.4 / 0.7 = 0.571 is enough


@pytest.mark.parametrize("columns", [5, 3000, 50_000])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 4.0, 40.0])
def test_nucleus_equals_that_of_a_full_sort(columns: int, scale: float) -> None:
    logits_NV = (random_logits(2, 3, columns, scale) * 8).round() / 8  # with many ties
    for top_p in (0.3, 0.95):
        warped_NV = warp_logits(logits_NV, SamplingSettings(temperature=1.0, top_p=top_p))
        ordered, order = logits_NV.sort(dim=-1, descending=True, stable=True)
        mass = (ordered - ordered[:, :1]).exp()
        kept = (mass.cumsum(dim=-1) - mass) < top_p * mass.sum(dim=-1, keepdim=True)
        expected = torch.zeros_like(kept).scatter(-1, order, kept)
        differing = (expected != warped_NV.isfinite()).sum(dim=-1)
        assert (differing <= 1).all()  # one token more or less where the mass is top_p up to rounding
        assert scale == 0 or (differing == 0).all()


def test_rows_do_not_depend_on_their_mates() -> None:
    logits_NV = random_logits(3, 5, 2000).float()
    settings = SamplingSettings(temperature=0.9, top_k=300, top_p=0.9, min_p=0.01)
    together = token_probs(logits_NV, settings)
    for row in range(5):
        assert torch.equal(token_probs(logits_NV[row], settings), together[row])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_shape_are_kept_and_the_input_is_not_changed(dtype: torch.dtype) -> None:
    logits = random_logits(4, 2, 50).to(dtype)
    before = logits.clone()
    history = TokenHistory([1])
    history.append(2)
    for settings in (
        SamplingSettings(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=2.0, presence_penalty=1.0),
        SamplingSettings(temperature=1.0),
        SamplingSettings(logit_bias={3: 1.0}),
    ):
        for given_logits in (logits, logits[0]):
            probs = token_probs(given_logits, settings, history)
            assert probs.shape == given_logits.shape
            assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(probs.sum(dim=-1), torch.ones(probs.shape[:-1], dtype=probs.dtype))
    assert torch.equal(logits, before)


def test_greedy_is_one_hot_with_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [9.0, 1.0, 9.0, 9.0]])
    assert token_probs(logits, SamplingSettings(top_k=3, top_p=0.9)).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_greedy_looks_at_bias_and_penalties() -> None:
    logits = torch.tensor([5.0, 4.9, 0.0])
    history = TokenHistory()
    history.append(0)
    assert token_probs(logits, SamplingSettings(frequency_penalty=0.2), history).tolist() == [0, 1, 0]
    assert token_probs(logits, SamplingSettings(logit_bias={2: 6.0})).tolist() == [0, 0, 1]


def test_penalties_in_their_order() -> None:
    """Bias, then repetition (prompt and output), then frequency and presence (output only), then temperature."""
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5], dtype=torch.float64)
    history = TokenHistory([0, 1])
    history.extend([2, 2, 3])
    settings = SamplingSettings(
        temperature=0.5, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5,
        logit_bias={0: -1.0, 3: 3.0},
    )  # fmt: skip
    expected = [(2 - 1) / 2, -2 * 2, 1 / 2 - 2 * 0.5 - 0.25, (-1 + 3) / 2 - 0.5 - 0.25, 0.5]
    assert warp_logits(logits, settings, history).tolist() == pytest.approx([value / 0.5 for value in expected])


def test_one_history_for_each_row() -> None:
    logits_NV = random_logits(5, 3, 20)
    settings = SamplingSettings(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)
    rows = TokenHistory([4, 5]).after_each([5, 9])
    together = token_probs(logits_NV, settings, rows)
    for row, history in enumerate(rows):
        torch.testing.assert_close(together[row], token_probs(logits_NV[row], settings, history))


def test_reduced_vocabulary_columns_follow_their_target_ids() -> None:
    """Any order of columns; ids without a column have no effect."""
    full = random_logits(6, 2, 40)
    token_ids = torch.tensor([30, 2, 17, 8])
    history = TokenHistory([2, 39, 5])
    history.extend([17, 17, 38])
    settings = SamplingSettings(
        temperature=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias={30: 1.0, 31: 5.0, 1000: 2.0},
    )  # fmt: skip
    reduced = warp_logits(full[:, token_ids], settings, history, token_ids)
    in_range = SamplingSettings(**{**settings_fields(settings), "logit_bias": {30: 1.0, 31: 5.0}})
    torch.testing.assert_close(reduced, warp_logits(full, in_range, history)[:, token_ids])


def settings_fields(settings: SamplingSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in SamplingSettings.__dataclass_fields__}


def test_history_ids_beyond_the_logits_are_not_penalised() -> None:
    """A prompt may hold ids that the head cannot produce (padded embeddings)."""
    logits = random_logits(7, 1, 10)
    settings = SamplingSettings(temperature=1.0, repetition_penalty=2.0)
    history = TokenHistory([3, 11])
    torch.testing.assert_close(warp_logits(logits, settings, history), warp_logits(logits, settings, TokenHistory([3])))


def test_masked_logits_stay_masked() -> None:
    logits = torch.tensor([1.0, -INFINITY, 0.5, -INFINITY])
    history = TokenHistory([1])
    history.append(3)
    for settings in (
        SamplingSettings(temperature=2.0, top_p=0.999999),
        SamplingSettings(temperature=2.0, top_k=3, top_p=0.999999),
        SamplingSettings(temperature=1.0, repetition_penalty=0.5, presence_penalty=-2.0, logit_bias={1: 10.0}),
    ):
        assert (token_probs(logits, settings, history) > 0).tolist() == [True, False, True, False]


def test_forbidding_a_token() -> None:
    probs = token_probs(torch.tensor([5.0, 1.0]), SamplingSettings(temperature=1.0, logit_bias={0: -INFINITY}))
    assert probs.tolist() == [0, 1]


def test_smallest_temperature_does_not_overflow() -> None:
    probs = token_probs(torch.tensor([1e4, 1e4 - 1, -1e4]), SamplingSettings(temperature=1e-5, top_p=0.5, min_p=0.5))
    assert probs.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("logits", "fields", "message"),
    [
        (torch.zeros(2, 3, 4), {}, "shape"),
        (torch.zeros(2, 0), {}, "shape"),
        (torch.tensor([0.0, math.nan]), {}, "NaN"),
        (torch.tensor([0.0, INFINITY]), {"temperature": 1.0}, "inf"),
        (torch.zeros(2), {"logit_bias": {0: -INFINITY, 1: -INFINITY}}, "forbids every token"),
        (torch.zeros(2), {"logit_bias": {2: 1.0}}, "logit_bias names token 2"),
        (torch.zeros(2), {"repetition_penalty": 1.1}, "history is missing"),
    ],
)
def test_errors(logits: Tensor, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_probs(logits, SamplingSettings(**fields))


def test_errors_of_shapes_beside_the_logits() -> None:
    with pytest.raises(ValueError, match="token_ids_of_columns"):
        token_probs(torch.zeros(3), SamplingSettings(), None, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="history has 2 entries"):
        token_probs(torch.zeros(3, 4), SamplingSettings(presence_penalty=1.0), [TokenHistory(), TokenHistory()])

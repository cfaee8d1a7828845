from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.decoding import (
    Acceptance,
    SamplingSettings,
    accept_coupled,
    accept_greedy,
    accept_speculative,
    accept_speculative_rows,
    accept_tempered_rows,
    residual_probs,
    sample_from,
    sample_rows,
    token_probs,
)

LAST_UNIFORM = 1 - 2**-53
WEIGHT = st.sampled_from([0.0, 0.0, 1e-300, 1e-12, 1e-6, 0.1, 0.5, 1.0]) | st.floats(0, 1)
UNIFORM = st.sampled_from([0.0, LAST_UNIFORM]) | st.floats(0, 1, exclude_max=True)


@st.composite
def distributions(draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    weights = draw(st.lists(st.lists(WEIGHT, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    weights_RV = torch.tensor(weights, dtype=torch.float64).reshape(rows, columns)
    sums_R1 = weights_RV.sum(dim=-1, keepdim=True)
    assume(bool((sums_R1 > 1e-9).all()))
    return (weights_RV / sums_R1).to(dtype)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_happens_is_possible_under_the_target(data: st.DataObject) -> None:
    """Any p with zeros, any q with mass where p has none, any block length, any uniforms, both dtypes."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    vocab_size = data.draw(st.integers(1, 5))
    length = data.draw(st.integers(0, 4))
    token_ids = data.draw(st.none() | st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True))
    target_probs_RV = data.draw(distributions(length + 1, vocab_size, dtype))
    draft_probs_LD = data.draw(distributions(length, len(token_ids) if token_ids else vocab_size, dtype))
    draft_token_ids_D = None if token_ids is None else torch.tensor(token_ids)
    columns = [int(data.draw(st.sampled_from(row.nonzero().flatten().tolist()))) for row in draft_probs_LD]
    tokens = [token_ids[column] if token_ids else column for column in columns]
    uniforms = [data.draw(UNIFORM) for _ in range(length)]
    final_uniform = data.draw(UNIFORM)
    result = accept_speculative(tokens, target_probs_RV, draft_probs_LD, uniforms, final_uniform, draft_token_ids_D)
    assert 0 <= result.num_accepted <= length
    for k in range(result.num_accepted):
        assert target_probs_RV[k, tokens[k]] > 0
    assert target_probs_RV[result.num_accepted, result.next_token] > 0


@given(data=st.data())
@settings(max_examples=200)
def test_blocks_of_many_requests_are_judged_as_each_alone(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    token_ids = data.draw(st.none() | st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True))
    columns = token_ids or list(range(vocab_size))
    draft_token_ids_D = None if token_ids is None else torch.tensor(token_ids)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    targets = [data.draw(distributions(length + 1, vocab_size, dtype)) for length in lengths]
    drafts = [data.draw(distributions(length, len(columns), dtype)) for length in lengths]
    tokens = [
        [columns[data.draw(st.sampled_from(row.nonzero().flatten().tolist()))] for row in draft] for draft in drafts
    ]
    uniforms = [[data.draw(UNIFORM) for _ in range(length)] for length in lengths]
    finals = [data.draw(UNIFORM) for _ in lengths]
    together = accept_speculative_rows(
        lengths,
        list(itertools.chain(*tokens)),
        torch.cat(targets),
        torch.cat(drafts),
        list(itertools.chain(*uniforms)),
        finals,
        draft_token_ids_D,
    )
    blocks = zip(tokens, targets, drafts, uniforms, finals, strict=True)
    assert together == [accept_speculative(*block, draft_token_ids_D) for block in blocks]


def test_float32_sums_are_exact_where_it_matters() -> None:
    """Uniforms on both sides of the ratio of the rows' exact masses, as near to it as a float32 sum is wrong."""
    generator = torch.Generator().manual_seed(3)
    target_probs_RV = torch.randn(2, 20_000, generator=generator).softmax(-1)
    draft_probs_LD = torch.randn(1, 20_000, generator=generator).softmax(-1)
    p_V = target_probs_RV[0].double() / target_probs_RV[0].double().sum()
    q_V = draft_probs_LD[0].double() / draft_probs_LD[0].double().sum()
    for token in ((p_V < q_V) & (q_V > 1e-6)).nonzero().flatten().tolist()[:50]:
        ratio = float(p_V[token] / q_V[token])
        for factor, is_kept in ((1 - 1e-12, 1), (1 + 1e-12, 0)):
            result = accept_speculative([token], target_probs_RV, draft_probs_LD, [ratio * factor], 0.5)
            assert result.num_accepted == is_kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("final_uniform", [0.0, 0.3, LAST_UNIFORM])
def test_no_draft_is_a_plain_sample_of_the_target(dtype: torch.dtype, final_uniform: float) -> None:
    probs_1V = torch.tensor([[0.2, 0.0, 0.8]], dtype=dtype)
    result = accept_speculative([], probs_1V, torch.empty(0, 3), [], final_uniform)
    assert result == Acceptance(0, sample_from(probs_1V[0], final_uniform))
    assert accept_greedy([], [4]) == accept_coupled([], torch.tensor([4])) == Acceptance(0, 4)


@given(uniform=UNIFORM)
@settings(max_examples=50, deadline=None)
def test_equal_distributions_always_accept(uniform: float) -> None:
    probs_RV = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).softmax(dim=-1)
    tokens = sample_rows(probs_RV[:3], torch.tensor([0.1, 0.5, 0.9]))
    assert accept_speculative(tokens, probs_RV, probs_RV[:3], [uniform] * 3, 0.5).num_accepted == 3


def test_acceptance_boundary_is_strict() -> None:
    target_probs_RV = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    draft_probs_LD = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    below = accept_speculative([0], target_probs_RV, draft_probs_LD, [math.nextafter(0.5, 0)], 0.0)
    at = accept_speculative([0], target_probs_RV, draft_probs_LD, [0.5], 0.0)
    assert (below.num_accepted, at.num_accepted) == (1, 0)


def test_impossible_draft_is_rejected_even_at_uniform_zero() -> None:
    target_probs_RV = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert accept_speculative([0], target_probs_RV, torch.tensor([[1.0, 0.0]]), [0.0], 0.9) == Acceptance(0, 1)


def test_one_hot_target_is_the_greedy_rule() -> None:
    for draft in ([2, 1, 0], [2, 1, 1], [0, 1, 0]):
        argmax = [2, 1, 0, 1]
        target_probs_RV = torch.nn.functional.one_hot(torch.tensor(argmax), 3).float()
        draft_probs_LD = torch.full((3, 3), 1 / 3)
        for uniform in (0.0, 0.5, LAST_UNIFORM):
            result = accept_speculative(draft, target_probs_RV, draft_probs_LD, [uniform] * 3, uniform)
            assert result == accept_greedy(draft, argmax)


def test_residual() -> None:
    target_probs_V = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    draft_probs_V = torch.tensor([0.1, 0.4, 0.1, 0.4], dtype=torch.float64)
    assert residual_probs(target_probs_V, draft_probs_V).tolist() == pytest.approx([0.8, 0, 0.2, 0])
    reduced = residual_probs(target_probs_V, torch.tensor([0.9, 0.1], dtype=torch.float64), torch.tensor([3, 1]))
    assert reduced.tolist() == pytest.approx([0.5 / 0.9, 0.2 / 0.9, 0.2 / 0.9, 0])
    one_hot = torch.tensor([0.0, 1.0, 0.0])
    assert residual_probs(one_hot, torch.tensor([0.2, 0.5, 0.3])).tolist() == [0, 1, 0]


def test_residual_that_rounding_leaves_empty_falls_back_to_the_target() -> None:
    probs_V = torch.tensor([0.1, 0.0, 0.2, 0.7], dtype=torch.float64)
    assert torch.equal(residual_probs(probs_V, probs_V), probs_V / probs_V.sum())
    assert torch.equal(residual_probs(probs_V, probs_V * (1 - 1e-9)), probs_V / probs_V.sum())


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_rejection_between_distributions_that_differ_in_last_bits_only(data: st.DataObject) -> None:
    """p and q one rounding apart and u next to 1: if it is a rejection at all, the token is one of the target's."""
    probs_V = data.draw(distributions(1, 4, torch.float64))[0]
    token = int(probs_V.argmax())
    nudged_V = probs_V.clone()
    nudged_V[token] = math.nextafter(float(probs_V[token]), 2)
    for target, draft in ((probs_V, nudged_V), (nudged_V, probs_V)):
        result = accept_speculative([token], target.repeat(2, 1), draft[None], [LAST_UNIFORM], data.draw(UNIFORM))
        assert target[result.next_token] > 0


def test_float32_sums_make_no_bias() -> None:
    """Rows that sum to 1 only in float32 are compared after normalisation: scaled rows give the same outcome."""
    target_probs_RV = torch.tensor([[0.4, 0.6], [0.3, 0.7]], dtype=torch.float64)
    draft_probs_LD = torch.tensor([[0.8, 0.2]], dtype=torch.float64)
    for uniform in (0.5 - 1e-9, 0.5 + 1e-9):
        exact = accept_speculative([0], target_probs_RV, draft_probs_LD, [uniform], 0.5)
        scaled = accept_speculative([0], target_probs_RV * 1.0002, draft_probs_LD * 0.9999, [uniform], 0.5)
        assert exact == scaled


@given(
    drafts=st.lists(st.integers(0, 2), max_size=5),
    targets=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_accepting_while_equal(drafts: list[int], targets: list[int]) -> None:
    targets = targets[: len(drafts) + 1]
    result = accept_greedy(drafts, targets)
    assert result == accept_coupled(torch.tensor(drafts, dtype=torch.long), torch.tensor(targets))
    assert [*drafts[: result.num_accepted], result.next_token] == targets[: result.num_accepted + 1]
    assert result.num_accepted == len(drafts) or drafts[result.num_accepted] != result.next_token


UNIFORM_2x3 = torch.full((2, 3), 1 / 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_probs_RV": UNIFORM_2x3[:1]}, "target_probs_RV has shape"),
        ({"target_probs_RV": torch.zeros(2, 3)}, r"target_probs_RV\[0\] is not a distribution"),
        ({"target_probs_RV": torch.tensor([[0.5, 0.5, 0], [math.nan, 0.5, 0.5]])}, r"target_probs_RV\[1\]"),
        ({"target_probs_RV": torch.tensor([[1.5, -0.5, 0], [1, 0, 0]])}, "negative|smallest entry is -0.5"),
        ({"target_probs_RV": torch.randn(2, 3) * 9}, "not logits"),
        ({"draft_probs_LD": UNIFORM_2x3}, "draft_probs_LD has shape"),
        ({"draft_probs_LD": UNIFORM_2x3[:1, :2]}, "draft_probs_LD has 2 columns, not 3"),
        ({"draft_probs_LD": torch.tensor([[0.5, 0.5, math.inf]])}, r"draft_probs_LD\[0\]"),
        ({"draft_probs_LD": torch.tensor([[0.0, 0.5, 0.5]])}, "probability 0"),
        ({"draft_token_ids_D": torch.tensor([1, 2])}, "draft_probs_LD has 3 columns, not 2"),
        ({"draft_probs_LD": torch.tensor([[0.5, 0.5]]), "draft_token_ids_D": torch.tensor([1, 2])}, "probability 0"),
        ({"draft_tokens_L": [3]}, "outside the vocabulary"),
        ({"draft_tokens_L": [-1]}, "outside the vocabulary"),
        ({"accept_uniforms_L": []}, "accept_uniforms_L has 0 numbers"),
        ({"accept_uniforms_L": [1.0]}, r"outside \[0, 1\)"),
        ({"final_uniform": math.nan}, r"outside \[0, 1\)"),
    ],
)
def test_broken_contracts(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "draft_tokens_L": [0],
        "target_probs_RV": UNIFORM_2x3,
        "draft_probs_LD": UNIFORM_2x3[:1],
        "accept_uniforms_L": [0.5],
        "final_uniform": 0.5,
    }
    with pytest.raises(ValueError, match=message):
        accept_speculative(**(arguments | changes))


def test_numbers_of_blocks() -> None:
    one, none = torch.full((1, 3), 1 / 3), torch.empty(0, 3)
    with pytest.raises(ValueError, match="final_uniforms has 2 numbers for 1 blocks"):
        accept_speculative_rows([0], [], one, none, [], [0.5, 0.5])
    with pytest.raises(ValueError, match="draft_tokens_L has 0 tokens; draft_lengths asks for 1"):
        accept_speculative_rows([1], [], one, none, [], [0.5])
    assert accept_speculative_rows([], [], none, none, [], []) == []


def test_one_target_token_more_than_drafts() -> None:
    for accept in (accept_greedy, accept_coupled):
        with pytest.raises(ValueError, match="one more than draft tokens"):
            accept([1, 2], [1, 2])


# ---- the p/q rule on logits ------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    is_reduced=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=150, deadline=None)
def test_rows_of_logits_are_judged_as_their_distributions(
    seed: int, lengths: list[int], temperature: float, is_reduced: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab_size, num_drafted = 40, sum(lengths)
    logits_RV = 2 * torch.randn(num_drafted + len(lengths), vocab_size, generator=generator)
    logits_RV[:, 3] = -math.inf
    ids_D = torch.randperm(vocab_size, generator=generator)[:17] if is_reduced else None
    columns = vocab_size if ids_D is None else 17
    draft_probs_LD = torch.randn(num_drafted, columns, generator=generator, dtype=dtype).softmax(-1)
    columns_L = [int(torch.multinomial(row, 1, generator=generator)) for row in draft_probs_LD]
    tokens = columns_L if ids_D is None else ids_D[columns_L].tolist()
    uniforms = torch.rand(num_drafted + len(lengths), generator=generator, dtype=torch.float64).tolist()
    given_to_both = (draft_probs_LD, uniforms[:num_drafted], uniforms[num_drafted:], ids_D)
    probs_RV = token_probs(logits_RV, SamplingSettings(temperature=temperature))
    expected = accept_speculative_rows(lengths, tokens, probs_RV, *given_to_both)
    assert accept_tempered_rows(lengths, tokens, logits_RV, temperature, *given_to_both) == expected
    in_float64 = accept_tempered_rows(lengths, tokens, logits_RV.double(), temperature, *given_to_both)
    assert [block.num_accepted for block in in_float64] == [block.num_accepted for block in expected]


@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_token_of_logits_is_kept_with_p_over_q(is_reduced: bool) -> None:
    """Just below and just above the threshold of the uniform, which is all that decides; then the residual's law."""
    generator = torch.Generator().manual_seed(5)
    logits_RV = 2 * torch.randn(2, 6, generator=generator)
    ids_D = torch.tensor([4, 0, 3]) if is_reduced else None
    q_1D = torch.randn(1, 6 if ids_D is None else 3, generator=generator).softmax(-1)
    p_V, q_V = (logits_RV[0].double() / 0.8).softmax(-1), torch.zeros(6, dtype=torch.float64)
    q_V[torch.arange(6) if ids_D is None else ids_D] = q_1D[0].double()
    residual_V = (p_V - q_V).clamp(min=0)
    residual_V /= residual_V.sum()
    rejected = 0
    for token in range(6) if ids_D is None else ids_D.tolist():
        threshold = float(p_V[token] / q_V[token])

        def judge(uniform: float, final: float = 0.5, token: int = token) -> Acceptance:
            return accept_tempered_rows([1], [token], logits_RV, 0.8, q_1D, [uniform], [final], ids_D)[0]

        assert judge(min(threshold * (1 - 1e-5), LAST_UNIFORM)).num_accepted == 1
        if (above := threshold * (1 + 1e-5)) < 1.0:
            assert judge(above).num_accepted == 0
            rejected += 1
            ends_V = residual_V.cumsum(0)
            for next_token in residual_V.nonzero().flatten().tolist():
                begin = float(ends_V[next_token] - residual_V[next_token])
                assert judge(above, begin + 1e-5).next_token == next_token
                assert judge(above, float(ends_V[next_token]) - 1e-5).next_token == next_token
    assert rejected > 0


def test_rows_behind_a_rejection_are_not_looked_at() -> None:
    logits_RV = torch.zeros(3, 4)
    logits_RV[0, 1] = -math.inf
    logits_RV[1:] = math.nan
    draft_probs_LD = torch.full((2, 4), 0.25)
    block = accept_tempered_rows([2], [1, 2], logits_RV, 1.0, draft_probs_LD, [0.5, 0.5], [0.0])[0]
    assert (block.num_accepted, block.next_token) == (0, 0)
    with pytest.raises(ValueError, match=r"target_logits_RV\[1\] has no finite maximum"):
        accept_tempered_rows([2], [0, 2], logits_RV, 1.0, draft_probs_LD, [0.5, 0.5], [0.0])


def test_errors_of_rows_of_logits() -> None:
    logits_RV, uniform_LD = torch.zeros(2, 4), torch.full((1, 4), 0.25)

    def judge(
        token: int = 1, draft_probs_LD: torch.Tensor = uniform_LD, ids_D: torch.Tensor | None = None, u: float = 0.5
    ) -> None:
        accept_tempered_rows([1], [token], logits_RV, 1.0, draft_probs_LD, [u], [0.5], ids_D)

    judge()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        judge(token=4)
    with pytest.raises(ValueError, match=r"draft_probs_LD\[0\] is not a distribution: it sums to 2"):
        judge(draft_probs_LD=uniform_LD * 2)
    with pytest.raises(ValueError, match=r"its smallest entry is -0.2"):
        judge(draft_probs_LD=torch.tensor([[0.6, 0.6, -0.2, 0.0]]))
    with pytest.raises(ValueError, match=r"is not a distribution"):
        judge(draft_probs_LD=uniform_LD * math.nan)
    with pytest.raises(ValueError, match="probability 0"):
        judge(draft_probs_LD=torch.tensor([[0.5, 0.0, 0.5, 0.0]]))
    with pytest.raises(ValueError, match="probability 0"):
        judge(token=0, draft_probs_LD=torch.full((1, 2), 0.5), ids_D=torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="id outside the vocabulary"):
        judge(token=1, draft_probs_LD=torch.full((1, 2), 0.5), ids_D=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="id outside the vocabulary"):
        judge(token=0, draft_probs_LD=torch.full((1, 2), 0.5), ids_D=torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="temperature is 0"):
        accept_tempered_rows([1], [0], logits_RV, 0.0, uniform_LD, [0.5], [0.5])
    with pytest.raises(ValueError, match=r"target_logits_RV has shape \(3, 4\)"):
        accept_tempered_rows([1], [0], torch.zeros(3, 4), 1.0, uniform_LD, [0.5], [0.5])
    with pytest.raises(ValueError, match=r"outside \[0, 1\)"):
        judge(u=1.0)
    with pytest.raises(ValueError, match="draft_token_ids_D"):
        judge(draft_probs_LD=torch.full((1, 2), 0.5))

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.models.loading import LoadedTarget
from dspark.models.target import TargetOutput
from dspark.training.anchors import anchor_positions
from dspark.training.data.rows import DataRow
from dspark.training.states import StoreSpec, compute, store_spec
from dspark.training.states.compute import RowTokens, compute_states, length_batches
from dspark.training.states.spec import stored_row
from dspark.types import Segment
from tests.training.tiny import HIDDEN, VOCAB, tiny_target


def tokens_of(row: DataRow, spec: StoreSpec, end: int | None = None) -> RowTokens:
    stored = stored_row(row, spec)
    return RowTokens(row=stored, token_ids=row.token_ids, end=end or stored.length)


class Changed:
    """A target with some of its attributes replaced."""

    def __init__(self, target: Any, **changes: Any) -> None:
        self._target = target
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def test_states_are_those_of_the_target(target: LoadedTarget, rows: list[DataRow], spec: StoreSpec) -> None:
    computed = compute_states(target.model, [tokens_of(row, spec) for row in rows], spec)
    for row, states in zip(rows, computed, strict=True):
        length = len(row.token_ids)
        cache = target.model.new_cache(1, length)
        output = target.model.forward(
            torch.tensor(row.token_ids), [Segment(slot=0, start=0, length=length)], cache, tap_layers=(0, 2)
        )
        assert output.taps_NT is not None
        positions = torch.from_numpy(anchor_positions(row.response_spans))
        assert states.token_ids_S.tolist() == list(row.token_ids)
        torch.testing.assert_close(states.taps_ST.float(), output.taps_NT, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(states.hidden_PH.float(), output.hidden_NH[positions], rtol=1e-2, atol=1e-2)
        assert states.taps_ST.dtype == states.hidden_PH.dtype == torch.bfloat16
        logits = states.hidden_PH.float() @ target.model.lm_head_weight_VH.T
        torch.testing.assert_close(states.log_normaliser_P, logits.logsumexp(dim=1), rtol=1e-5, atol=1e-5)
        assert states.argmax_P.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_normalisers_are_exact_over_a_vocabulary_in_parts(
    target: LoadedTarget,
    rows: list[DataRow],
    spec: StoreSpec,
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    with_bias: bool,
) -> None:
    monkeypatch.setattr(compute, "_LOGIT_COLUMNS", 10)
    bias_V = 4 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) if with_bias else None
    model: Any = Changed(
        target.model, lm_head_bias_V=bias_V, config=replace(target.model.config, final_softcap=softcap)
    )
    (states,) = compute_states(model, [tokens_of(rows[0], spec)], spec)
    logits = states.hidden_PH.float() @ target.model.lm_head_weight_VH.T
    logits = logits if bias_V is None else logits + bias_V
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(states.log_normaliser_P, logits.logsumexp(dim=1), rtol=1e-6, atol=1e-5)
    assert states.argmax_P.tolist() == logits.argmax(dim=1).tolist()
    plain = states.hidden_PH.float() @ target.model.lm_head_weight_VH.T
    changed = (plain.logsumexp(dim=1) - states.log_normaliser_P).abs().max() > 0.1
    assert changed == (with_bias or softcap is not None)


def test_a_part_of_a_row_has_the_first_states(target: LoadedTarget, rows: list[DataRow], spec: StoreSpec) -> None:
    (whole,) = compute_states(target.model, [tokens_of(rows[0], spec)], spec)
    for end in (1, 5, 29, 33):
        (part,) = compute_states(target.model, [tokens_of(rows[0], spec, end)], spec)
        predictions = tokens_of(rows[0], spec).row.predictions_before(end)
        assert len(part.taps_ST) == end
        assert len(part.hidden_PH) == len(part.log_normaliser_P) == len(part.argmax_P) == predictions
        assert torch.equal(part.token_ids_S, whole.token_ids_S)
        torch.testing.assert_close(part.taps_ST, whole.taps_ST[:end], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(part.hidden_PH, whole.hidden_PH[:predictions], rtol=1e-2, atol=1e-2)


def test_states_may_be_used_under_autograd(rows: list[DataRow]) -> None:
    """Whatever mode the target computes in: a bfloat16 target's own taps would be passed on without a copy."""
    target = tiny_target(dtype="bfloat16")
    spec = store_spec(target.model, tap_layers=(1,), max_length=100, target_dtype="bfloat16")
    (states,) = compute_states(target.model, [tokens_of(rows[0], spec)], spec)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    (states.taps_ST @ weight).sum().backward()
    assert weight.grad is not None
    weight.grad = None
    (states.hidden_PH @ weight).sum().backward()
    assert weight.grad is not None


def test_token_ids_outside_the_vocabulary_are_refused(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec
) -> None:
    wrong = replace(rows[0], token_ids=(*rows[0].token_ids[:-1], VOCAB))
    for end in (None, 10):
        with pytest.raises(ValueError, match=f"token id {VOCAB}"):
            compute_states(target.model, [tokens_of(wrong, spec, end)], spec)


@pytest.mark.parametrize("where", ["hidden", "taps"])
def test_a_target_that_overflows_is_an_error(
    target: LoadedTarget, rows: list[DataRow], spec: StoreSpec, where: str
) -> None:
    def forward(*arguments: Any, **options: Any) -> TargetOutput:
        output = target.model.forward(*arguments, **options)
        assert output.taps_NT is not None
        broken = (output.hidden_NH if where == "hidden" else output.taps_NT).clone()
        broken[7, 0] = float("nan") if where == "hidden" else float("inf")
        return TargetOutput(
            hidden_NH=broken if where == "hidden" else output.hidden_NH,
            taps_NT=broken if where == "taps" else output.taps_NT,
            logits_MV=output.logits_MV,
        )

    model: Any = Changed(target.model, forward=forward)
    with pytest.raises(ValueError, match=r"NaN or infinite states for rows toy/0-000 … toy/0-000 in float32: .*dtype"):
        compute_states(model, [tokens_of(rows[0], spec)], spec)


def test_batches_hold_similar_lengths_up_to_a_limit(rows: list[DataRow], spec: StoreSpec) -> None:
    ends = [9, 30, 8, 31, 40, 7]
    batches = list(length_batches([tokens_of(row, spec, end) for row, end in zip(rows, ends, strict=True)], 35))
    assert [[item.end for item in batch] for batch in batches] == [[7, 8, 9], [30], [31], [40]]

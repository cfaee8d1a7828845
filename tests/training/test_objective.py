from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from dspark.training.objective import NO_LABEL, ObjectiveSettings, draft_terms, objective, slot_weights

GOLDEN = Path(__file__).parents[1] / "golden"


def naive(
    logits: Tensor,
    target_full: Tensor,
    columns: Tensor,
    labels: Tensor,
    weights: Tensor,
    confidence: Tensor | None,
    distillation: float = 0.0,
) -> Tensor:
    """The formula of section 3.3, slot by slot, over the whole target vocabulary."""
    total = torch.zeros((), dtype=torch.float64)
    for n in range(len(logits)):
        q = torch.zeros(target_full.shape[1], dtype=torch.float64)
        q[columns] = torch.softmax(logits[n], dim=0)
        p = torch.softmax(target_full[n], dim=0)
        l1 = (q - p).abs().sum()
        ce = -torch.log_softmax(logits[n], dim=0)[labels[n]] if labels[n] >= 0 else torch.zeros((), dtype=torch.float64)
        soft = -(p[columns] * torch.log_softmax(logits[n], dim=0)).sum()
        slot = 0.1 * ce + 0.9 * l1 + distillation * soft
        if confidence is not None:
            c, label = torch.sigmoid(confidence[n]), (1 - l1 / 2).detach()
            slot = slot - label * c.log() - (1 - label) * (1 - c).log()
        total = total + weights[n] * slot
    return total / weights.sum()


def example(rows: int = 37, vocab: int = 50, reduced: int = 30, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(vocab, generator=generator)[:reduced].sort().values
    target = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(-1, reduced, (rows,), generator=generator)
    labels[0] = NO_LABEL
    return {
        "logits": torch.randn(rows, reduced, generator=generator, dtype=torch.float64) * 2,
        "target": target,
        "columns": columns,
        "labels": labels,
        "weights": slot_weights(7, 4.0).repeat(6)[:rows] * (torch.rand(rows, generator=generator) > 0.2),
        "confidence": torch.randn(rows, generator=generator, dtype=torch.float64),
    }


def ours(
    e: dict[str, Tensor],
    logits: Tensor,
    confidence: Tensor | None,
    distillation: float = 0.0,
    total_weight: float | None = None,
) -> Tensor:
    return objective(
        logits_ND=logits,
        target_logits_ND=e["target"][:, e["columns"]],
        target_log_normaliser_N=e["target"].logsumexp(dim=1),
        label_columns_N=e["labels"],
        slot_weights_N=e["weights"],
        settings=ObjectiveSettings(distillation=distillation),
        confidence_logits_N=confidence,
        total_weight=total_weight,
    ).loss


@pytest.mark.parametrize("reduced", [30, 50])
@pytest.mark.parametrize("with_confidence", [True, False])
@pytest.mark.parametrize("distillation", [0.0, 0.7])
def test_loss_and_gradients_equal_the_formula_under_autograd(
    reduced: int, with_confidence: bool, distillation: float
) -> None:
    e = example(reduced=reduced)
    values = [[e["logits"].clone().requires_grad_(), e["confidence"].clone().requires_grad_()] for _ in range(2)]
    losses = []
    for function, (logits, confidence) in zip(("naive", "ours"), values, strict=True):
        given = confidence if with_confidence else None
        if function == "naive":
            loss = naive(logits, e["target"], e["columns"], e["labels"], e["weights"], given, distillation)
        else:
            loss = ours(e, logits, given, distillation)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values[0][0].grad, values[1][0].grad, rtol=1e-10, atol=1e-13)
    if with_confidence:
        torch.testing.assert_close(values[0][1].grad, values[1][1].grad, rtol=1e-10, atol=1e-13)


def test_rows_do_not_depend_on_the_chunk_they_fall_in(monkeypatch: pytest.MonkeyPatch) -> None:
    e = example()
    whole = e["logits"].clone().requires_grad_()
    ours(e, whole, None).backward()
    monkeypatch.setattr("dspark.training.objective._CHUNK_ELEMENTS", 100)
    pieces = e["logits"].clone().requires_grad_()
    ours(e, pieces, None).backward()
    assert torch.equal(whole.grad, pieces.grad)  # type: ignore[arg-type]


def test_parts_of_a_step_add_up_to_its_loss_and_gradient() -> None:
    e = example()
    whole = e["logits"].clone().requires_grad_()
    loss = ours(e, whole, e["confidence"], 0.3)
    loss.backward()
    pieces = e["logits"].clone().requires_grad_()
    total = float(e["weights"].sum())
    parts = []
    for rows in (slice(0, 20), slice(20, 37), slice(0, 0)):
        part = {**e, "target": e["target"][rows], "labels": e["labels"][rows], "weights": e["weights"][rows]}
        parts.append(ours(part, pieces[rows], e["confidence"][rows], 0.3, total_weight=total))
    torch.stack(parts).sum().backward()
    torch.testing.assert_close(torch.stack(parts).sum(), loss)
    torch.testing.assert_close(pieces.grad, whole.grad)


def test_low_precision_stays_near_float64_and_keeps_its_dtype() -> None:
    e = example()
    exact = e["logits"].bfloat16().double().requires_grad_()
    reference = ours(e, exact, None)
    reference.backward()
    low = e["logits"].bfloat16().requires_grad_()
    loss = ours({**e, "target": e["target"].float()}, low, None)
    loss.backward()
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    torch.testing.assert_close(low.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    e = example()
    terms = draft_terms(
        logits_ND=e["logits"],
        target_logits_ND=e["target"][:, e["columns"]],
        target_log_normaliser_N=e["target"].logsumexp(dim=1),
        label_columns_N=e["labels"],
        ce_weights_N=e["weights"],
        tv_weights_N=e["weights"],
    )
    p = torch.softmax(e["target"], dim=1)[:, e["columns"]]
    overlap = torch.minimum(p, torch.softmax(e["logits"], dim=1)).sum(dim=1)
    torch.testing.assert_close(terms.acceptance_N, overlap)


def test_a_label_outside_the_draft_vocabulary_has_no_cross_entropy_but_its_weight_counts() -> None:
    e = example(rows=2)
    e["weights"] = torch.ones(2, dtype=torch.float64)
    e["labels"] = torch.tensor([3, NO_LABEL])
    settings = ObjectiveSettings(cross_entropy=1.0, total_variation=0.0)
    terms = objective(
        logits_ND=e["logits"],
        target_logits_ND=e["target"][:, e["columns"]],
        target_log_normaliser_N=e["target"].logsumexp(dim=1),
        label_columns_N=e["labels"],
        slot_weights_N=e["weights"],
        settings=settings,
    )
    expected = F.cross_entropy(e["logits"][:1], e["labels"][:1]) / 2
    torch.testing.assert_close(terms.loss, expected)


@pytest.mark.parametrize("name", ["dspark-vanilla", "dspark-gated", "dspark-rnn"])
def test_golden_training_batches(name: str) -> None:
    golden = load_file(GOLDEN / name / "expected_training.safetensors")
    supervised = golden["supervised"].bool()
    logits = golden["draft_logits"][supervised]
    target = golden["target_logits"][supervised].double()
    slots = supervised.nonzero()[:, 2]
    terms = objective(
        logits_ND=logits,
        target_logits_ND=target,
        target_log_normaliser_N=target.logsumexp(dim=1),
        label_columns_N=golden["target_ids"][supervised],
        slot_weights_N=slot_weights(supervised.shape[2], 4.0)[slots],
        settings=ObjectiveSettings(),
        confidence_logits_N=golden["confidence_logits"][supervised],
    )
    expected = naive(
        logits.double(),
        target,
        torch.arange(logits.shape[1]),
        golden["target_ids"][supervised],
        slot_weights(supervised.shape[2], 4.0)[slots],
        golden["confidence_logits"][supervised].double(),
    )
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_weights_fall_by_e_every_d_slots() -> None:
    weights = slot_weights(9, 4.0)
    assert weights[0] == 1.0
    assert (weights[8] / weights[4]).item() == pytest.approx((weights[4] / weights[0]).item())
    assert weights[4].item() == pytest.approx(0.36787944)


def test_errors_name_what_is_wrong() -> None:
    e = example()
    with pytest.raises(ValueError, match="no slot of the batch is supervised"):
        ours({**e, "weights": torch.zeros(37, dtype=torch.float64)}, e["logits"], None)
    with pytest.raises(ValueError, match="label_columns_N"):
        ours({**e, "labels": e["labels"][:3]}, e["logits"], None)
    with pytest.raises(ValueError, match="decay"):
        ObjectiveSettings(decay=0.0)
    with pytest.raises(ValueError, match="total_variation"):
        ObjectiveSettings(total_variation=float("nan"))

"""The training objective of DSpark (section 3.3), as functions over tensors.

Every supervised slot ``k`` of a block (``k = 1..γ``) is one row. With draft distribution ``q`` and target distribution
``p`` over the *whole* target vocabulary,

    L = Σ w_k (a·CE_k + b·‖q_k − p_k‖₁ + c·BCE(c_k, 1 − ½‖q_k − p_k‖₁)) / Σ w_k,        w_k = exp(−(k−1)/d).

Eagle3's own loss, the cross-entropy ``−Σ_v p_k(v) log q_k(v)`` against the target's distribution, is a further term
("distillation"), off by default.

The draft vocabulary may be smaller than the target's. The target then comes as its logits on the draft columns together
with the log-normaliser (logsumexp) of its logits over the full vocabulary, so that ``p`` on the draft columns is exact
and the mass the target has elsewhere is known: ``q`` is zero there, so that mass counts fully in the total variation. A
label outside the draft vocabulary (column ``NO_LABEL``) has no cross-entropy term, because the drafter cannot say that
token at any price; its slot still counts in the total variation, in the confidence term and in the denominator.

Shapes: N rows (slots), D draft-vocabulary columns, G slots of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["NO_LABEL", "DraftTerms", "ObjectiveSettings", "ObjectiveTerms", "draft_terms", "objective", "slot_weights"]

NO_LABEL = -1
"""Label column of a slot without a cross-entropy term."""

_CHUNK_ELEMENTS = 1 << 19
"""Rows are handled in chunks of about this many logits, so that later passes read the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Coefficients of the loss.

    Attributes:
        cross_entropy: a, weight of the cross-entropy against the data's token.
        total_variation: b, weight of ``‖q − p‖₁`` (twice the total-variation distance).
        distillation: weight of ``−Σ_v p(v) log q(v)`` over the draft columns (EAGLE-3, arXiv 2503.01840).
        confidence: c, weight of the confidence head's binary cross-entropy.
        decay: d of ``w_k = exp(−(k−1)/d)``, in slots.
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    distillation: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0

    def __post_init__(self) -> None:
        for name in ("cross_entropy", "total_variation", "distillation", "confidence"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"loss weight {name} is {value}: give a finite number of at least 0")
        if not self.decay > 0.0:
            raise ValueError(f"decay is {self.decay}: give a number of slots above 0")


@dataclass(frozen=True, kw_only=True)
class DraftTerms:
    """Cross-entropy and total variation of N slots.

    Attributes:
        weighted_sum: ``Σ_n (ce_weights_N·CE + tv_weights_N·‖q − p‖₁ − distillation_weights_N·Σ_v p log q)``; the
            only differentiable field.
        cross_entropy_N: nats; 0 where the slot has no label column.
        l1_distance_N: ``‖q − p‖₁`` over the full vocabulary, in [0, 2].
    """

    weighted_sum: Tensor
    cross_entropy_N: Tensor
    l1_distance_N: Tensor

    @property
    def acceptance_N(self) -> Tensor:
        """Probability that a token drawn from ``q`` is accepted: ``1 − ½‖q − p‖₁`` (eq. 8)."""
        return 1.0 - 0.5 * self.l1_distance_N


@dataclass(frozen=True, kw_only=True)
class ObjectiveTerms:
    """The loss of a batch and the terms it was made of, per slot."""

    loss: Tensor
    draft: DraftTerms
    confidence_bce_N: Tensor | None


def slot_weights(block_size: int, decay: float) -> Tensor:
    """``w_k = exp(−(k−1)/d)`` for k = 1..γ; float64 of shape [G]."""
    return torch.exp(-torch.arange(block_size, dtype=torch.float64) / decay)


class _DraftTerms(torch.autograd.Function):
    """Weighted cross-entropy plus ``‖q − p‖₁`` with its gradient computed in the forward pass.

    With ``s = sign(q − p)`` on the draft columns,

        ∂CE/∂z = q − onehot(label)        ∂‖q − p‖₁/∂z = q ⊙ (s − ⟨q, s⟩)        ∂(−⟨p, log q⟩)/∂z = ⟨p, 1⟩ q − p

    so one softmax serves all terms and autograd never stores more than one [N, D] array (in the logits' own dtype).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_ND: Tensor,
        target_logits_ND: Tensor,
        target_log_normaliser_N: Tensor,
        label_columns_N: Tensor,
        ce_weights_N: Tensor,
        tv_weights_N: Tensor,
        distillation_weights_N: Tensor | None,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_columns = logits_ND.shape
        work = torch.float64 if logits_ND.dtype == torch.float64 else torch.float32
        log_normaliser_N = target_log_normaliser_N.to(work)
        ce_weights_N, tv_weights_N = ce_weights_N.to(work), tv_weights_N.to(work)
        distillation_N = None if distillation_weights_N is None else distillation_weights_N.to(work)
        distillation = logits_ND.new_zeros((), dtype=work)
        has_label_N = label_columns_N >= 0
        columns_N = label_columns_N.clamp(min=0)
        cross_entropy_N = torch.empty(num_rows, dtype=work, device=logits_ND.device)
        l1_distance_N = torch.empty_like(cross_entropy_N)
        gradient_ND = torch.empty_like(logits_ND) if with_gradient else None
        chunk = num_rows if logits_ND.is_cuda else max(1, _CHUNK_ELEMENTS // num_columns)
        for begin in range(0, num_rows, chunk):
            rows = slice(begin, min(begin + chunk, num_rows))
            columns = columns_N[rows, None]
            logits = logits_ND[rows].to(work)
            maximum = logits.amax(dim=1, keepdim=True)
            label_logits = logits.gather(1, columns) - maximum
            draft = torch.sub(logits, maximum).exp_()
            total = draft.sum(dim=1, keepdim=True)
            draft.div_(total)
            cross_entropy_N[rows] = torch.where(has_label_N[rows], (total.log() - label_logits).squeeze(1), 0.0)
            difference = torch.sub(target_logits_ND[rows].to(work), log_normaliser_N[rows, None]).exp_()
            inside = difference.sum(dim=1)
            outside = (1.0 - inside).clamp(min=0.0)
            distilled = None
            if distillation_N is not None:
                weights = distillation_N[rows]
                log_draft_sum = torch.linalg.vecdot(difference, logits - maximum) - inside * total.log().squeeze(1)
                distillation -= torch.dot(weights, log_draft_sum)
                if gradient_ND is not None:
                    distilled = torch.addcmul(difference.neg(), inside[:, None], draft).mul_(weights[:, None])
            torch.sub(draft, difference, out=difference)
            l1_distance_N[rows] = torch.linalg.vector_norm(difference, ord=1, dim=1) + outside
            if gradient_ND is None:
                continue
            sign = difference.sign_()
            tv_weights = tv_weights_N[rows, None]
            ce_weights = torch.where(has_label_N[rows], ce_weights_N[rows], 0.0)[:, None]
            mean_sign = torch.linalg.vecdot(draft, sign, dim=1)[:, None]
            sign.mul_(tv_weights).add_(ce_weights - tv_weights * mean_sign).mul_(draft)
            sign.scatter_add_(1, columns, -ce_weights)
            gradient_ND[rows] = sign if distilled is None else sign.add_(distilled)
        ctx.save_for_backward(gradient_ND)
        ctx.mark_non_differentiable(cross_entropy_N, l1_distance_N)
        weighted_sum = ce_weights_N @ cross_entropy_N + tv_weights_N @ l1_distance_N + distillation
        return weighted_sum, cross_entropy_N, l1_distance_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_ND,) = ctx.saved_tensors
        scale = gradients[0].to(gradient_ND.dtype)
        if scale.is_cpu and scale == 1.0:
            return gradient_ND, None, None, None, None, None, None, None
        return gradient_ND * scale, None, None, None, None, None, None, None


def draft_terms(
    *,
    logits_ND: Tensor,
    target_logits_ND: Tensor,
    target_log_normaliser_N: Tensor,
    label_columns_N: Tensor,
    ce_weights_N: Tensor,
    tv_weights_N: Tensor,
    distillation_weights_N: Tensor | None = None,
) -> DraftTerms:
    """Cross-entropy and ``‖q − p‖₁`` of N slots, summed with the given weights.

    Args:
        logits_ND: draft logits, any floating dtype; float64 stays float64, everything else is computed in float32.
        target_logits_ND: the target's logits on the draft columns.
        target_log_normaliser_N: logsumexp of the target's logits over the *full* vocabulary.
        label_columns_N: int64, the data's token as a draft column, or ``NO_LABEL``.
        ce_weights_N: weight of each slot's cross-entropy in the sum.
        tv_weights_N: weight of each slot's ``‖q − p‖₁`` in the sum.
        distillation_weights_N: weight of each slot's cross-entropy against the target's distribution; None for none.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if logits_ND.ndim != 2 or target_logits_ND.shape != logits_ND.shape:
        raise ValueError(
            f"draft logits {tuple(logits_ND.shape)} and target logits {tuple(target_logits_ND.shape)} "
            "must both be [N, D]"
        )
    for name, tensor in (
        ("target_log_normaliser_N", target_log_normaliser_N),
        ("label_columns_N", label_columns_N),
        ("ce_weights_N", ce_weights_N),
        ("tv_weights_N", tv_weights_N),
    ):
        if tensor.shape != logits_ND.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected [{logits_ND.shape[0]}]")
    with_gradient = torch.is_grad_enabled() and logits_ND.requires_grad
    weighted_sum, cross_entropy_N, l1_distance_N = _DraftTerms.apply(  # type: ignore[no-untyped-call]
        logits_ND,
        target_logits_ND,
        target_log_normaliser_N,
        label_columns_N,
        ce_weights_N,
        tv_weights_N,
        distillation_weights_N,
        with_gradient,
    )
    return DraftTerms(weighted_sum=weighted_sum, cross_entropy_N=cross_entropy_N, l1_distance_N=l1_distance_N)


def objective(
    *,
    logits_ND: Tensor,
    target_logits_ND: Tensor,
    target_log_normaliser_N: Tensor,
    label_columns_N: Tensor,
    slot_weights_N: Tensor,
    settings: ObjectiveSettings,
    confidence_logits_N: Tensor | None = None,
    total_weight: float | None = None,
) -> ObjectiveTerms:
    """The loss of one batch (section 3.3).

    A batch that is a part of a step gives ``total_weight`` of the whole step: the losses of the parts then add up to
    the step's loss, and so do their gradients.

    Args:
        logits_ND: draft logits, sequential head included.
        target_logits_ND: the target's logits on the draft columns.
        target_log_normaliser_N: logsumexp of the target's logits over the full vocabulary.
        label_columns_N: int64, the data's token as a draft column, or ``NO_LABEL``.
        slot_weights_N: ``w_k`` of supervised slots, 0 of the others; they also make the denominator.
        settings: coefficients.
        confidence_logits_N: logits of ``c_k``; their label is a constant, no gradient flows through it.
        total_weight: denominator ``Σ w_k``; by default the sum of ``slot_weights_N``.

    Raises:
        ValueError: shapes do not belong together, or no slot is supervised.
    """
    if total_weight is None:
        total_weight = float(slot_weights_N.sum())
    if not total_weight > 0.0:
        raise ValueError("no slot of the batch is supervised: its rows have no response of two tokens or more")
    weights_N = slot_weights_N / total_weight
    draft = draft_terms(
        logits_ND=logits_ND,
        target_logits_ND=target_logits_ND,
        target_log_normaliser_N=target_log_normaliser_N,
        label_columns_N=label_columns_N,
        ce_weights_N=weights_N * settings.cross_entropy,
        tv_weights_N=weights_N * settings.total_variation,
        distillation_weights_N=weights_N * settings.distillation if settings.distillation > 0.0 else None,
    )
    if confidence_logits_N is None:
        return ObjectiveTerms(loss=draft.weighted_sum, draft=draft, confidence_bce_N=None)
    labels_N = draft.acceptance_N.clamp(0.0, 1.0).detach()
    bce_N = F.binary_cross_entropy_with_logits(confidence_logits_N.to(labels_N.dtype), labels_N, reduction="none")
    loss = draft.weighted_sum + settings.confidence * (weights_N.to(bce_N.dtype) @ bce_N)
    return ObjectiveTerms(loss=loss, draft=draft, confidence_bce_N=bce_N.detach())

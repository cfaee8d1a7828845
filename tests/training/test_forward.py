from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.training.forward import TargetHead

VOCAB, HIDDEN, ROWS = 53, 16, 40


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_teachers_probabilities_are_those_of_the_target(
    autocast: bool, reduced: bool, with_bias: bool, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        """Numbers that bfloat16 can hold, so that only the result is rounded."""
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).float()

    head_VH, hidden_NH = 2 * numbers(VOCAB, HIDDEN), numbers(ROWS, HIDDEN)
    bias_V = 4 * torch.randn(VOCAB, generator=generator) if with_bias else None
    ids_D = torch.arange(2, VOCAB, 3) if reduced else torch.arange(VOCAB)
    drafter: Any = SimpleNamespace(
        draft_token_ids_D=ids_D if reduced else None,
        device=torch.device("cpu"),
        config=SimpleNamespace(vocab_size=VOCAB),
        lm_head=SimpleNamespace(weight=head_VH[ids_D]),
    )
    target: Any = SimpleNamespace(lm_head_bias_V=bias_V, config=SimpleNamespace(final_softcap=softcap))
    logits_NV = hidden_NH @ head_VH.T
    logits_NV = logits_NV if bias_V is None else logits_NV + bias_V
    logits_NV = logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)
    expected_ND = logits_NV.log_softmax(dim=1)[:, ids_D]

    head = TargetHead.of(drafter, target)
    found_ND, normaliser_N = head.logits(
        hidden_NH.to(torch.bfloat16), torch.logsumexp(logits_NV, dim=1), autocast=autocast
    )
    # Relative to the log-probability: what is likely is exact.
    tolerance = {"rtol": 2.0**-8, "atol": 1e-4} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found_ND.float() - normaliser_N[:, None], expected_ND, **tolerance)
    assert softcap is not None or expected_ND.max() > -0.05
    columns = head.column_of_id_V.tolist()
    assert [columns[token] for token in ids_D.tolist()] == list(range(len(ids_D)))
    assert all(columns[token] == -1 for token in set(range(VOCAB)) - set(ids_D.tolist()))

"""Adam by row."""

from __future__ import annotations

import torch

from dspark.training.row_adam import RowAdam


def test_a_restored_state_is_where_the_parameter_is() -> None:
    """A checkpoint is read on the CPU; torch moves every state to the parameter but one called ``step``."""
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    optimiser = RowAdam([parameter])
    parameter.grad = torch.ones(4, 2)
    optimiser.step()
    elsewhere = torch.nn.Parameter(torch.zeros(4, 2, device="meta"))
    restored = RowAdam([elsewhere])
    restored.load_state_dict(optimiser.state_dict())
    assert {name: value.device.type for name, value in restored.state[elsewhere].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), "meta"
    )


def test_row_adam_is_adam_on_the_rows_it_touches() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator)
    table = torch.nn.Embedding(6, 4)
    table.weight.data.copy_(start)
    ours = RowAdam([table.weight], lr=0.1, betas=(0.9, 0.99))
    rows = {row: torch.nn.Parameter(start[row].clone()) for row in (1, 4)}
    theirs = {row: torch.optim.Adam([parameter], lr=0.1, betas=(0.9, 0.99)) for row, parameter in rows.items()}
    for touched in ([1, 4, 1], [4], [1], [4, 4]):
        scale = torch.randn(len(touched), 4, generator=generator)
        table.weight.grad = None
        (table(torch.tensor(touched)) * scale).sum().backward()
        ours.step()
        for row in set(touched):
            rows[row].grad = scale[[i for i, t in enumerate(touched) if t == row]].sum(dim=0)
            theirs[row].step()
    for row in range(6):
        torch.testing.assert_close(table.weight[row], rows[row] if row in rows else start[row])

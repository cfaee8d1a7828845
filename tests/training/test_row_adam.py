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

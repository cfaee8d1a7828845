"""Small work on tensors between the compiled parts of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def as_tensor(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 ``[N]``; a few numbers in a fraction of the time that ``torch.tensor`` takes for a list."""
    return torch.from_numpy(np.array(numbers, np.int64)).to(device)


def pick_rows(values_NX: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows, in this order; on a CPU without PyTorch's threads, which would go on spinning beside ours."""
    if values_NX.is_cpu and values_NX.dtype == torch.float32:
        return torch.from_numpy(values_NX.numpy()[np.array(rows, np.int64)])
    return values_NX[as_tensor(rows, values_NX.device)]

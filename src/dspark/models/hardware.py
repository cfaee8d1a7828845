"""What computes here: its name, and what it is good at."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["hardware_name", "multiplies_bfloat16"]


def hardware_name(device: torch.device) -> str:
    """Model name of the GPU that ``device`` is, or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are no slower than in float32; on CPUs without instructions for it they are.

    With AVX2 alone a product of many rows takes five to seven times as long.
    """
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

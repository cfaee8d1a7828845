"""What computes here, by name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["hardware_name"]


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

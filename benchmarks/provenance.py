"""Where a number came from: written beside every result."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Command, commit, versions and hardware of this run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    ) if Path("/proc/cpuinfo").exists() else platform.processor()  # fmt: skip
    return {
        "command": [Path(sys.argv[0]).name, *(Path(word).name if "/" in word else word for word in sys.argv[1:])],
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
    }

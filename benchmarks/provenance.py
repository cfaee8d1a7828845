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

from dspark.models.hardware import hardware_name


def provenance() -> dict[str, Any]:
    """Command, commit, versions and hardware of this run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": [Path(sys.argv[0]).name, *(Path(word).name if "/" in word else word for word in sys.argv[1:])],
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": hardware_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
    }

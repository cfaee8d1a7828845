"""Where a checkpoint came from: command, commit, versions, machine, data."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dspark.models.hardware import hardware_name
from dspark.models.instructions import INSTRUCTIONS
from dspark.training.states import StoredRow

__all__ = ["data_fingerprint", "provenance"]


def data_fingerprint(rows: Sequence[StoredRow]) -> str:
    """Hash of the rows' ids, tokens and spans, independent of their order."""
    digest = hashlib.sha256()
    for line in sorted(f"{row.id} {row.digest}\n" for row in rows):
        digest.update(line.encode())
    return digest.hexdigest()[:32]


def provenance(**facts: Any) -> dict[str, Any]:
    """Command line, commit, versions and hardware of this process, and the given facts of the run."""
    return {
        "command": shlex.join(sys.argv),
        "commit": _commit(Path(__file__)),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("dspark", "torch", "transformers", "numpy", "safetensors")},
        },
        "machine": {
            "platform": platform.platform(),
            "processor": hardware_name(torch.device("cpu")),
            "int8_instructions": None if INSTRUCTIONS is None else INSTRUCTIONS.name,
            "threads": torch.get_num_threads(),
        },
        **facts,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(source: Path) -> str | None:
    """Commit of the tree that ``source`` is tracked in, with ``+changes`` when tracked files differ from it.

    None outside a repository, and where the package is installed somewhere below one that it is no part of.
    """
    directory = source.parent
    try:
        _git(directory, "ls-files", "--error-unmatch", source.name)
        commit = _git(directory, "rev-parse", "HEAD").strip()
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + "+changes" if changed else commit


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True, timeout=10
    ).stdout

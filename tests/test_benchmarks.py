"""The scripts in benchmarks/ start as they are documented, without the repository's root on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(
    path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text()
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_how_it_is_used(script: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "usage:" in run.stdout

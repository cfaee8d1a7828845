"""Compiled code is remembered, and a process that cannot read or write what is remembered still computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark import compiling

PROGRAM = """
import logging, resource, sys
from numba import int64
from dspark.compiling import remembered

logging.basicConfig(format="%(message)s")  # to stderr

def double(x):
    return 2 * x

if sys.argv[1:] == ["full"]:  # files may not grow, as on a full disk
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for_python, for_c = remembered(double), remembered(double, int64(int64))
print(for_python(21), for_c.ctypes(4), sum(for_python.stats.cache_hits.values()), for_c.cache_hits)
"""


def run(directory: Path, *arguments: str) -> tuple[list[str], str]:
    """What the program says, and what it warns of; its compiled code is kept below ``directory``."""
    program = directory / "program.py"
    if not program.exists():
        program.write_text(PROGRAM)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(directory / "kept"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, program, *arguments], env=environment, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == (["42", "8", "0", "0"], "")
    assert run(tmp_path) == (["42", "8", "1", "1"], "")


def test_a_full_disk_costs_a_warning(tmp_path: Path) -> None:
    said, warned = run(tmp_path, "full")
    assert said == ["42", "8", "0", "0"]
    assert "compiled code of __main__.double cannot be kept ([Errno 27] File too large)" in warned
    assert "NUMBA_CACHE_DIR" in warned
    assert run(tmp_path) == (["42", "8", "0", "0"], "")  # and nothing half-written was left behind


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("kept_bytes", [0, 10, 0.5])
def test_cut_files_are_made_again(kind: str, kept_bytes: float, tmp_path: Path) -> None:
    run(tmp_path)
    files = list((tmp_path / "kept").rglob(f"*.{kind}"))
    assert files
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[: kept_bytes if isinstance(kept_bytes, int) else int(len(content) * kept_bytes)])
    said, warned = run(tmp_path)
    assert said == ["42", "8", "0", "0"]
    assert "kept code of __main__.double cannot be read" in warned
    assert "NUMBA_CACHE_DIR" not in warned
    assert run(tmp_path) == (["42", "8", "1", "1"], "")


def test_cut_files_on_a_full_disk_cost_warnings(tmp_path: Path) -> None:
    run(tmp_path)
    for file in (tmp_path / "kept").rglob("*.nbi"):
        file.write_bytes(file.read_bytes()[:10])
    said, warned = run(tmp_path, "full")
    assert said == ["42", "8", "0", "0"]
    assert "cannot be read" in warned
    assert "cannot be kept" in warned


def test_without_any_directory_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere(function: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(compiling, "_LenientCache", nowhere)
    assert compiling.remembered(lambda x: 2 * x)(21) == 42
    assert "cannot be kept (no locator available)" in caplog.text

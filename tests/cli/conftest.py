"""A tiny target with a tokenizer, on disk, and the drafter that was made for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark.cli import main
from tests.cli.tokenizer import character_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"


@dataclass(frozen=True)
class Run:
    """What one command line left behind."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """stderr after the line that says which type was taken for the target."""
        first, rest = self.err.split("\n", 1)
        assert " runs in " in first, first
        return rest


@pytest.fixture
def dspark(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Run a command line in this process."""

    def run(*arguments: object) -> Run:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Run(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden Qwen3 target (211 tokens, 6 layers) as a checkpoint directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("target") / "tiny"
    shutil.copytree(GOLDEN / "qwen3-tiny-target", directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_drafter() -> Path:
    """The golden drafter for it: block of 5, vanilla head."""
    return GOLDEN / "dspark-vanilla"


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """Two prompts, the second of two turns."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["one and two"], "domain": "math"}, {"turns": ["first", "then"], "id": 7}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path

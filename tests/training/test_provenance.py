from __future__ import annotations

import subprocess
from pathlib import Path

from dspark.training.provenance import _commit


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_tree_the_source_belongs_to(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1")
    assert _commit(source) is None
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "of something else")
    assert _commit(source) is None  # installed below a repository of the user's
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "--quiet", "--message", "its own")
    assert _commit(source) == git(tmp_path, "rev-parse", "HEAD")
    source.write_text("2")
    assert _commit(source) == git(tmp_path, "rev-parse", "HEAD") + "+changes"

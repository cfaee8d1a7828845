"""Making the embedded target, without the wheel that it is made of."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dspark.models import embedded
from dspark.models.embedded import embedded_target


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Workspaces of the builds, which are slow and small; the cache is in tmp_path."""
    workspaces: list[Path] = []
    two_at_once = threading.Event()

    def fetch(workspace: Path) -> Path:
        workspaces.append(workspace)
        if len(workspaces) > 1:
            two_at_once.set()
        two_at_once.wait(0.3)
        return workspace / "a.gguf"

    def convert(gguf_path: Path, directory: Path) -> None:
        assert gguf_path.parent.is_dir()
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_fetch", fetch)
    monkeypatch.setattr(embedded, "_convert", convert)
    return workspaces


def cached(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir()} - {".making.lock"}


def test_what_a_killed_build_left_goes_with_the_next_one(builds: list[Path], tmp_path: Path) -> None:
    leftover = tmp_path / "cache" / ".making-killed" / "checkpoint"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    (tmp_path / "cache" / "other").mkdir()
    made = embedded_target()
    assert cached(tmp_path) == {made.name, "other"}
    assert embedded_target() == made
    assert len(builds) == 1


def test_two_that_need_it_at_once_make_it_once(builds: list[Path], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = {future.result() for future in [pool.submit(embedded_target) for _ in range(4)]}
    assert cached(tmp_path) == {path.name for path in made}
    assert (made.pop() / "config.json").is_file()
    assert len(builds) == 1


def test_a_build_that_fails_leaves_nothing_and_lets_the_next_one_in(
    builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(embedded, "_convert", lambda *_: (tmp_path / "missing").read_text())
        with pytest.raises(FileNotFoundError):
            embedded_target()
    assert cached(tmp_path) == set()
    assert embedded_target().is_dir()
    assert len(builds) == 2

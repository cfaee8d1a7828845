from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dspark.files import (
    exclusive,
    remove_leftovers,
    replacing,
    replacing_directory,
    sha256_file,
    write_json,
    write_text,
)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write more than ``size`` bytes into a file, in the middle of it, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with replacing(path) as partial:
        partial.write_text("new")
        assert partial.parent == tmp_path
        assert json.loads(path.read_text()) == {"old": 1}
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.json"]


def test_an_error_of_the_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_text(path, "old")
    with pytest.raises(KeyError), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("writer", ["text", "safetensors", "torch"])
def test_a_write_that_fails_half_way_names_the_file_and_leaves_no_trace(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "a.bin"
    write_text(path, "old")
    numbers = torch.zeros(100_000)
    with (  # noqa: PT012
        pytest.raises(
            OSError, match=r"a\.bin could not be written \(.*\); what was there before is unchanged"
        ) as caught,
        largest_file(20_000),
        replacing(path) as partial,
    ):
        if writer == "text":
            partial.write_text("x" * 100_000)
        elif writer == "safetensors":
            save_file({"numbers": numbers}, partial)
        else:
            torch.save({"numbers": numbers}, partial)
    assert caught.value.errno == (None if writer == "torch" else errno.EFBIG)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.bin"]


def test_a_disk_that_fills_up_on_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"new\.json could not be written \(No space left on device\)") as caught:
        write_json(tmp_path / "new.json", {})
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_a_directory_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step"
    for content in ("first", "second"):
        with replacing_directory(path) as partial:
            (partial / content).write_text(content)
            (partial / "sub").mkdir()
            (partial / "sub" / "inner").write_text(content)
        assert names(path) == [content, "sub"]
    with pytest.raises(OSError, match="step could not be written"), replacing_directory(path) as partial:  # noqa: PT012
        (partial / "third").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(path) == ["second", "sub"]
    assert names(tmp_path / "runs") == ["step"]


def test_a_directory_that_cannot_take_its_place_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step"
    with replacing_directory(path) as partial:
        (partial / "old").write_text("old")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if target == path and (source / "new").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="step could not be written"), replacing_directory(path) as partial:
        (partial / "new").write_text("new")
    assert names(path) == ["old"]
    assert names(tmp_path) == ["step"]


def test_only_leftovers_of_the_asked_files_go(tmp_path: Path) -> None:
    for name in (".shard-0.safetensors.ab12.partial", ".index.json.ab12.partial", ".bashrc", "a.partial"):
        (tmp_path / name).write_text("half")
    (tmp_path / ".step-1.cd34.partial").mkdir()
    (tmp_path / ".git").mkdir()
    remove_leftovers(tmp_path, "shard-*.safetensors")
    assert ".index.json.ab12.partial" in names(tmp_path)
    assert ".shard-0.safetensors.ab12.partial" not in names(tmp_path)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".bashrc", ".git", "a.partial"]


def test_json_keeps_letters_as_they_are(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"γ": [1, 2]}, indent=None)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{"γ": [1, 2]}\n'


def test_one_writer_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    with (
        exclusive(directory),
        pytest.raises(BlockingIOError, match=f"another process is writing to {directory}"),
        exclusive(directory),
    ):
        pass
    with exclusive(directory):
        assert names(directory) == []


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 1000).hexdigest()

"""Files that are whole or not there: writing in one step, one writer a directory, checksums.

A file that is being written is called ``.<name>.<random>.partial`` and lies beside its final place, so a killed process
leaves nothing but such files; :func:`remove_leftovers` takes them away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

__all__ = [
    "exclusive",
    "fsync_file",
    "remove_leftovers",
    "replacing",
    "replacing_directory",
    "sha256_file",
    "write_json",
    "write_text",
]

_SUFFIX = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file in one step: the body writes the path it is given, which becomes ``path`` when all of it is on disk.

    When the body or the disk fails, what was at ``path`` stays as it was and nothing else is left behind.

    Raises:
        OSError: it could not be written, naming ``path`` and why. safetensors and torch report a full disk by errors
            of their own (``SafetensorError``, ``RuntimeError``); they become this one too.
    """
    partial = _partial(path)
    try:
        yield partial
        fsync_file(partial)
        os.replace(partial, path)
        fsync_file(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _write_error(path, error) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Write a directory of files in one step: the body fills the directory it is given, which then becomes ``path``.

    A directory that was at ``path`` is deleted after the new one is in its place. When the body or the disk fails, it
    stays as it was and nothing else is left behind.

    Raises:
        OSError: as in :func:`replacing`.
    """
    partial, replaced = _partial(path), _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for file in (*partial.rglob("*"), partial):
            fsync_file(file)
        if path.exists():
            os.rename(path, replaced)
        os.rename(partial, path)
        fsync_file(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _write_error(path, error) from error
    finally:
        if replaced.exists() and not path.exists():
            os.rename(replaced, path)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) in one step.

    Raises:
        OSError: as in :func:`replacing`.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file in one step; ``indent`` None puts it on one line.

    Raises:
        OSError: as in :func:`replacing`.
    """
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def remove_leftovers(directory: Path, pattern: str = "*") -> None:
    """Delete what killed writers left of files (or directories) whose names match ``pattern``.

    Only for the one writer of the directory (:func:`exclusive`): another one may still be writing them.
    """
    for leftover in directory.glob(f".{pattern}.*{_SUFFIX}"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Make ``directory`` if need be and keep other writers out of it; a killed process holds nothing.

    Raises:
        BlockingIOError: another process (or another writer of this one) writes there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is writing to {directory}: wait for it, stop it, or take another directory"
            ) from None
        yield
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Wait until the content of a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _partial(path: Path) -> Path:
    # Random, not the process id: two containers that share a disk both have a process 1.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")


def _write_error(path: Path, error: Exception) -> OSError:
    """An error that names the file the caller asked for, with the system's number for it where there is one."""
    if isinstance(error, OSError):
        number, reason = error.errno, error.strerror or str(error)
    else:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number, reason = (int(found[1]), os.strerror(int(found[1]))) if found else (None, str(error))
    message = f"{path} could not be written ({reason}); what was there before is unchanged"
    return OSError(message) if number is None else OSError(number, message)

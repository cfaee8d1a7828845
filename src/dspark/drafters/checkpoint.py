"""Reading and writing drafter directories in the published form (FORMATS.md, form A; form B is read)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.drafters.calibration_file import (
    CALIBRATION_FILE,
    CalibrationFile,
    attached_calibration,
    read_calibration,
)
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.initialization import check_target, vocabulary_maps
from dspark.drafters.protocol import DraftTarget
from dspark.drafters.registry import TrainableDrafter, new_drafter, read_config
from dspark.files import replacing, write_json
from dspark.heap import trim_heap

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATING_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EMBEDDED_DIRECTORY = "assets/smollm2-135m-instruct"


def load_drafter(
    name_or_directory: str | Path,
    target: DraftTarget | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    calibrated: bool = True,
) -> TrainableDrafter:
    """Load a drafter of any kind from ``config.json`` and ``model.safetensors``, with its calibration if it has one.

    Args:
        name_or_directory: ``embedded``, the drafter for the embedded target that ships with the package, or a
            drafter's directory.
        target: The model it drafts for. Checked against the drafter, and the source of ``embed_tokens`` and
            ``lm_head`` where the file has none.
        device: Where to put the parameters.
        dtype: Floating-point type to run in; by default the one of the file, with products in int8 where the target has
            them and the drafter can (`DSparkDrafter.can_compute_in_int8`). Drafts need no precision, and a small type
            keeps them fast, also beside a target in float32.
        calibrated: Whether to attach ``calibration.json``; without it, as for training and for fitting a new one,
            confidences are raw.

    Raises:
        ValueError: naming the file and the field or tensor that is missing, unknown, of the wrong shape, or at odds
            with the target.
    """
    if name_or_directory == "embedded":
        with as_file(files("dspark").joinpath(_EMBEDDED_DIRECTORY)) as embedded:
            return load_drafter(embedded, target, device=device, dtype=dtype, calibrated=calibrated)
    directory = Path(name_or_directory)
    config = read_config(directory / CONFIG_FILE)
    if target is not None:
        try:
            check_target(config, target)
        except ValueError as error:
            raise ValueError(f"{directory / CONFIG_FILE}: {error}") from error
    path, stored = _read_tensors(directory)
    drafter = new_drafter(config)
    expected = drafter.state_dict()
    _complete_vocabulary(path, config, stored)
    _complete_from_target(path, config, stored, target)
    _check_tensors(path, stored, expected)
    follows_target = dtype is None
    dtype = stored["norm.weight"].dtype if dtype is None else dtype
    tensors = {
        name: tensor.to(device=device, dtype=dtype if expected[name].is_floating_point() else expected[name].dtype)
        for name, tensor in stored.items()
    }
    drafter.load_state_dict(tensors, assign=True)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    wants_int8 = follows_target and target is not None and target.compute_dtype == "int8"
    if wants_int8 and isinstance(drafter, DSparkDrafter) and drafter.can_compute_in_int8:
        drafter.compute_in_int8()
        trim_heap()  # of what quantising took
    if calibrated:
        drafter.calibration = attached_calibration(
            directory, drafter, block_size=config.block_size, confident=drafter.has_confidence_head
        )
    return drafter


def read_drafter_calibration(name_or_directory: str | Path) -> CalibrationFile | None:
    """What a drafter's calibration file says of itself; None where there is none.

    Raises:
        ValueError: naming the file and the field that cannot be used.
    """
    if name_or_directory == "embedded":
        with as_file(files("dspark").joinpath(_EMBEDDED_DIRECTORY)) as embedded:
            return read_drafter_calibration(embedded)
    directory = Path(name_or_directory)
    path = directory / CALIBRATION_FILE
    if not path.exists():
        return None
    return read_calibration(path, block_size=read_config(directory / CONFIG_FILE).block_size)


def save_drafter(
    drafter: TrainableDrafter,
    directory: str | Path,
    *,
    include_embeddings: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `drafter` in form A. Each file is replaced in one step, so that a crash never leaves half of one.

    Args:
        drafter: What to write.
        directory: Created if needed; other files in it are left alone.
        include_embeddings: Whether to write ``embed_tokens`` and a full-vocabulary ``lm_head``, which are the
            target's. The ``lm_head`` of a reduced vocabulary is always written: readers need it.
        dtype: Floating-point type on disk; the parameters' own by default.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = drafter.config
    stored_dtype = drafter.dtype if dtype is None else dtype
    left_out = set() if include_embeddings else {"embed_tokens.weight"}
    if not include_embeddings and not config.has_reduced_vocabulary:
        left_out.add("lm_head.weight")
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if name in left_out:
            continue
        tensor = tensor.detach().to(device="cpu", dtype=stored_dtype if tensor.is_floating_point() else tensor.dtype)
        # Parameters may share memory with each other (fused weights, a tied target); the file format does not.
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    with replacing(directory / TENSOR_FILE) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    write_json(directory / CONFIG_FILE, config.to_dict(str(stored_dtype).removeprefix("torch.")))


def _read_tensors(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """All tensors of the directory, and the file to name in errors."""
    path, index = directory / TENSOR_FILE, directory / INDEX_FILE
    files = [path]
    if not path.exists() and index.exists():
        path = index
        files = _indexed_files(index)
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            raise ValueError(f"{file}: no such file; a drafter directory holds {CONFIG_FILE} and {TENSOR_FILE}")
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    tensors[name] = reader.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: not a readable safetensors file ({error}); fetch or write it again") from error
    return path, tensors


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({index.parent / name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: holds no weight_map with the name of each tensor's file; fetch it again") from error


def _complete_vocabulary(path: Path, config: DrafterConfig, stored: dict[str, Tensor]) -> None:
    """Check the maps of a reduced vocabulary; add ``t2d`` where it was left out."""
    if not config.has_reduced_vocabulary:
        for name in ("d2t", "t2d"):
            if name in stored:
                raise ValueError(
                    f"{path}: tensor {name} is present although draft_vocab_size equals vocab_size; "
                    "correct draft_vocab_size"
                )
        return
    if "d2t" not in stored:
        raise ValueError(
            f"{path}: tensor d2t is missing although draft_vocab_size ({config.draft_vocab_size}) is smaller than "
            f"vocab_size ({config.vocab_size})"
        )
    offsets = stored["d2t"]
    if offsets.dtype != torch.int64 or offsets.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"{path}: tensor d2t is {offsets.dtype} of shape {list(offsets.shape)}; "
            f"it must be int64 of shape [{config.draft_vocab_size}]"
        )
    try:
        _, t2d = vocabulary_maps(config, offsets + torch.arange(len(offsets)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if "t2d" in stored and not torch.equal(stored["t2d"].to(torch.bool), t2d):
        raise ValueError(f"{path}: tensor t2d does not mark the tokens that d2t names")
    stored["t2d"] = t2d


def _complete_from_target(
    path: Path, config: DrafterConfig, stored: dict[str, Tensor], target: DraftTarget | None
) -> None:
    """Take ``embed_tokens`` and ``lm_head`` from the target where the file has none."""
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in stored:
            continue
        if target is None:
            raise ValueError(
                f"{path}: tensor {name} is missing; it is the target's, so load the drafter together with its target"
            )
        if name == "embed_tokens.weight":
            stored[name] = target.embedding_weight_VH.detach()
        elif config.has_reduced_vocabulary:
            ids = stored["d2t"] + torch.arange(config.draft_vocab_size)
            head = target.lm_head_weight_VH.detach()
            stored[name] = head[ids.to(head.device)]
        else:
            stored[name] = target.lm_head_weight_VH.detach()


def _check_tensors(path: Path, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        raise ValueError(
            f"{path}: tensor {missing[0]} is missing{_more(missing)}; the file does not fit its {CONFIG_FILE}"
        )
    unknown = sorted(stored.keys() - expected.keys())
    if unknown:
        raise ValueError(
            f"{path}: tensor {unknown[0]} is not known{_more(unknown)}; the file does not fit its {CONFIG_FILE}"
        )
    for name, tensor in expected.items():
        if stored[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(stored[name].shape)}, "
                f"but {CONFIG_FILE} asks for {list(tensor.shape)}"
            )
        if tensor.is_floating_point() and stored[name].dtype not in _FLOATING_TYPES:
            raise ValueError(
                f"{path}: tensor {name} is {stored[name].dtype}; quantised drafters are not read, it must be one of "
                f"{', '.join(map(str, _FLOATING_TYPES))}"
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

"""Find and load a target: the embedded one, a directory, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder, why_not_int8
from dspark.models.embedded import NAME as EMBEDDED_NAME
from dspark.models.embedded import embedded_target
from dspark.models.gguf_file import read_gguf
from dspark.models.hardware import multiplies_bfloat16
from dspark.models.target import Target

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_NOT_CHECKPOINT_FILES = ["consolidated*", "original/*"]  # the same weights once more, in a vendor's own format

Implementation = Literal["native", "transformers"]


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    """A target ready to run, with its tokenizer.

    Attributes:
        name: what to call it in output.
        stop_token_ids: tokens that end an answer (``eos_token_id`` of the generation config, config and tokenizer).
        implementation: what computes it: the native decoder, or transformers.
        notices: what the user should be told about what ``auto`` chose, a line each.
    """

    model: Target
    tokenizer: PreTrainedTokenizerBase
    name: str
    stop_token_ids: frozenset[int]
    implementation: Implementation = "native"
    notices: tuple[str, ...] = ()

    @property
    def public_name(self) -> str:
        """What to call it in what leaves the machine: of a path its end, as where it lies is no one's business."""
        return Path(self.name).name if Path(self.name).exists() else self.name


def load_target(
    name_or_path: str = "embedded",
    *,
    dtype: str = "auto",
    device: str = "cpu",
    implementation: Implementation | Literal["auto"] = "auto",
) -> LoadedTarget:
    """Load a target and its tokenizer.

    Args:
        name_or_path: ``embedded``, a checkpoint directory, a ``.gguf`` file, or a hub name.
        dtype: ``float32``, ``bfloat16``, ``int8`` (native only), or ``auto`` (see :func:`resolve_dtype`); what was
            taken is ``model.compute_dtype``.
        device: where to run it.
        implementation: ``native`` or ``transformers``; ``auto`` is native where the checkpoint's family and settings
            are supported, and transformers elsewhere, which ``notices`` then says with the reason.

    Raises:
        ValueError: if the checkpoint cannot be used, naming the field or tensor.
        OSError: if it cannot be found or fetched.
    """
    if implementation not in ("auto", "native", "transformers"):
        raise ValueError(f"implementation {implementation!r} is not one of auto, native, transformers")
    _check_device(device)
    path = find_checkpoint(name_or_path)
    name = EMBEDDED_NAME if name_or_path == "embedded" else name_or_path
    if path.is_file():
        if implementation == "transformers":
            raise ValueError(f"{path}: a GGUF file runs natively only; give implementation native or auto")
        gguf = read_gguf(path)
        gguf_config = DecoderConfig.from_huggingface(gguf.config)
        compute_dtype = resolve_dtype(dtype, device, gguf_config)
        return LoadedTarget(
            model=Decoder(gguf_config, gguf.weights, compute_dtype=compute_dtype, device=device),
            tokenizer=gguf.tokenizer,
            name=name,
            stop_token_ids=read_stop_token_ids(gguf.config, {}, gguf.tokenizer),
            notices=_dtype_notices(name, gguf_config, dtype, device),
        )
    raw = read_checkpoint_json(path / "config.json")
    generation = read_checkpoint_json(path / "generation_config.json", required=False)
    config, why_not_native = _native_config(raw, implementation)
    compute_dtype = resolve_dtype(dtype, device, config)
    notices: tuple[str, ...]
    model: Target
    if config is not None:
        model = Decoder(config, _read_weights(path), compute_dtype=compute_dtype, device=device)
        notices = _dtype_notices(name, config, dtype, device)
    else:
        from dspark.models.transformers_checkpoint import read_transformers  # takes a second or two

        notices = (
            () if why_not_native is None else (_implementation_notice(name, why_not_native, dtype, compute_dtype),)
        )
        model = read_transformers(path, raw, compute_dtype=compute_dtype, device=device)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return LoadedTarget(
        model=model,
        tokenizer=tokenizer,
        name=name,
        stop_token_ids=read_stop_token_ids(raw, generation, tokenizer),
        implementation="native" if config is not None else "transformers",
        notices=notices,
    )


def resolve_dtype(dtype: str, device: str, config: DecoderConfig | None) -> str:
    """``auto`` is int8 for a native target on a CPU with the instructions for it, where it is the fastest.

    Elsewhere it is bfloat16, through transformers too: half the memory to read for each token; but float32 on a CPU
    that has no instructions for bfloat16 (:func:`~dspark.models.hardware.multiplies_bfloat16`).

    Args:
        config: of the native decoder; None for a target that runs through transformers.
    """
    if dtype != "auto":
        return dtype
    if config is not None and torch.device(device).type == "cpu" and why_not_int8(config) is None:
        return "int8"
    return "bfloat16" if multiplies_bfloat16(torch.device(device)) else "float32"


def _dtype_notices(name: str, config: DecoderConfig, asked: str, device: str) -> tuple[str, ...]:
    """What ``auto`` took for a native target on a CPU, and why."""
    if asked != "auto" or torch.device(device).type != "cpu":
        return ()
    reason = why_not_int8(config)
    if reason is None:
        return (f"{name} runs in int8, the fastest here; dtype bfloat16 or float32 is nearer to its weights",)
    return (f"{name} runs in {resolve_dtype(asked, device, config)}: the faster int8 needs {reason}",)


def _native_config(
    raw: dict[str, Any], implementation: Implementation | Literal["auto"]
) -> tuple[DecoderConfig | None, str | None]:
    """The native decoder's config; or None, with the reason unless transformers was asked for."""
    if implementation == "transformers":
        return None, None
    try:
        return DecoderConfig.from_huggingface(_text_config(raw)), None
    except ValueError as error:
        if implementation == "native":
            raise
        return None, str(error)


def _implementation_notice(name: str, why_not_native: str, dtype: str, compute_dtype: str) -> str:
    chosen = f", in {compute_dtype}" if dtype == "auto" else ""
    return f"{name} runs through transformers{chosen}, not the faster native decoder: {why_not_native}"


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from error


def find_checkpoint(name_or_path: str, *, weights: bool = True) -> Path:
    """The checkpoint directory or GGUF file of a target, fetched where it is not on this machine.

    Args:
        name_or_path: as in :func:`load_target`.
        weights: whether a hub checkpoint's weights are fetched; without them only its config and tokenizer are.

    Raises:
        ValueError: if a file is no GGUF file.
        OSError: if it cannot be found or fetched.
    """
    if name_or_path == "embedded":
        return embedded_target()
    path = Path(name_or_path).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file but not a .gguf; give the checkpoint's directory")
        return path
    if path.is_dir():
        return path
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1 or name_or_path.endswith(".gguf"):
        raise FileNotFoundError(f"no such target: {name_or_path} (embedded, a directory, a .gguf file, or owner/name)")
    wanted = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=wanted, ignore_patterns=_NOT_CHECKPOINT_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise OSError(f"could not fetch {name_or_path} from the Hugging Face hub: {error}") from error


def read_checkpoint_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a checkpoint's file; empty where the file is missing and not ``required``.

    Raises:
        FileNotFoundError: if it is missing and required.
        ValueError: if it holds something else.
    """
    if not path.is_file():
        if required:
            raise FileNotFoundError(f"{path} is missing: not a Hugging Face checkpoint directory")
        return {}
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal Gemma 3 config."""
    if raw.get("model_type") == "gemma3" and "text_config" in raw:
        return {**raw["text_config"], "model_type": "gemma3_text"}
    return raw


def _read_weights(directory: Path) -> dict[str, torch.Tensor]:
    index = read_checkpoint_json(directory / "model.safetensors.index.json", required=False)
    names = ["model.safetensors"]
    if index:
        if not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"{directory / 'model.safetensors.index.json'} has no weight_map: fetch it again")
        names = sorted(set(index["weight_map"].values()))
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing (only safetensors checkpoints are read)")
        try:
            with safe_open(directory / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    if (ours := _language_model_name(key)) is not None:
                        weights[ours] = file.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{directory / name} is damaged ({error}); fetch it again") from error
    return weights


def _language_model_name(key: str) -> str | None:
    """Strip the nesting of multimodal checkpoints; None for their vision tensors."""
    if key.startswith(
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    ):
        return None
    for prefix in ("model.language_model.", "language_model.model."):
        if key.startswith(prefix):
            return "model." + key.removeprefix(prefix)
    return key.removeprefix("language_model.")


def read_stop_token_ids(
    raw: dict[str, Any], generation: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Tokens that end an answer: ``eos_token_id`` of the generation config, the config (``raw``) and the tokenizer."""
    ids: set[int] = set()
    configs = (generation, raw, raw.get("text_config") or {})
    for value in (*(config.get("eos_token_id") for config in configs), tokenizer.eos_token_id):
        ids.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(ids)

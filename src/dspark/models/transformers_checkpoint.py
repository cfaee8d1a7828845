"""Checkpoint directories of any family that transformers knows, read by transformers itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from dspark.models.transformers_cache import layer_kinds
from dspark.models.transformers_target import COMPUTE_DTYPES, TransformersTarget, transformers_fingerprint


def read_transformers(
    directory: Path, raw: Mapping[str, Any], *, compute_dtype: str, device: torch.device | str
) -> TransformersTarget:
    """Load ``directory`` through ``AutoModelForCausalLM``; code that comes with a checkpoint is never run.

    Args:
        raw: contents of its ``config.json``.
        compute_dtype: ``float32`` or ``bfloat16``.

    Raises:
        ValueError: if the type is not offered, the model cannot be a target, or its weights do not fit its config.
        OSError: if a file is missing.
    """
    model_type = raw.get("model_type")
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"dtype {compute_dtype} is not offered for model_type {model_type!r}, which runs through transformers; "
            f"use {' or '.join(COMPUTE_DTYPES)} (or auto)"
        )
    _check_config(directory, raw)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    layer_kinds(config.get_text_config(decoder=True))  # before the weights are read
    model = _read(directory, "auto")
    # Of the stored numbers, before they are converted: one checkpoint has one fingerprint.
    fingerprint = transformers_fingerprint(model)
    dtype = COMPUTE_DTYPES[compute_dtype]
    if any(parameter.dtype != dtype for parameter in model.parameters()):
        if dtype == torch.float32:
            model = model.float()
        else:
            # Read again, because transformers knows what must stay in float32.
            del model
            model = _read(directory, dtype)
    return TransformersTarget(model, device=device, fingerprint=fingerprint)


def _check_config(directory: Path, raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise ValueError(
                f"config.json: model_type {model_type!r} needs code that comes with the checkpoint (auto_map), which "
                "is not run; use a checkpoint of a family that transformers itself has"
            )
        raise ValueError(
            f"config.json: model_type {model_type!r} is not known to transformers {transformers.__version__}; upgrade "
            "it, or use a checkpoint of a family that it has"
        )
    if raw.get("quantization_config"):
        raise ValueError("config.json: quantization_config is not supported; use an unquantised checkpoint")
    if not any(directory.glob("*.safetensors")):
        raise FileNotFoundError(f"{directory} has no *.safetensors file (only safetensors checkpoints are read)")


def _read(directory: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except SafetensorError as error:
        raise ValueError(f"{directory}: its weights are damaged ({error}); fetch it again") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names: Sequence[Any] = sorted(report.get(what) or ())
        if names:
            raise ValueError(
                f"{directory}: {len(names)} tensors are {what.removesuffix('_keys')} for {type(model).__name__}, the "
                f"first is {names[0]}; the checkpoint and its config.json do not belong together"
            )
    loaded: PreTrainedModel = model
    return loaded

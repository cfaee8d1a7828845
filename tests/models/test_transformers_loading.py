"""Checkpoint directories of families that are not native: which way they take, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig
from transformers.models.gemma4 import Gemma4Config, Gemma4TextConfig

from dspark.cli.models import open_models
from dspark.models import loading
from dspark.models.decoder import Decoder
from dspark.models.loading import LoadedTarget, load_target, resolve_dtype
from dspark.models.transformers_target import TransformersTarget
from dspark.types import Segment
from tests.cli.tokenizer import VOCABULARY_SIZE, character_tokenizer
from tests.models.tiny_transformers import random_model, tiny_config


def save(directory: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    random_model(config).to(dtype).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "mistral", tiny_config("mistral", vocab_size=VOCABULARY_SIZE))


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def logits(target: LoadedTarget) -> torch.Tensor:
    model = target.model
    ids = torch.arange(20)
    return model.logits(model.forward(ids, [Segment(0, 0, 20)], model.new_cache(1, 20)).hidden_NH)


def test_a_family_that_is_not_native_runs_through_transformers_and_says_so(checkpoint: Path) -> None:
    target = load_target(str(checkpoint), dtype="float32")
    assert isinstance(target.model, TransformersTarget)
    assert target.implementation == "transformers"
    (notice,) = target.notices
    assert notice.startswith(f"{checkpoint} runs through transformers, not the faster native decoder: config.json: ")
    assert "model_type 'mistral' is not one of the native families" in notice
    assert target.stop_token_ids == {2}
    ids = target.tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert target.tokenizer.decode(ids) == "hello"
    with torch.no_grad():
        expected = random_model(tiny_config("mistral", vocab_size=VOCABULARY_SIZE))(torch.arange(20)[None]).logits[0]
    torch.testing.assert_close(logits(target), expected, atol=1e-4, rtol=0)


def test_commands_print_the_notice(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda device: True)
    models = open_models(target=str(checkpoint), drafter=None, speculation=False, dtype="auto", device="cpu")
    captured = capsys.readouterr()
    assert captured.err.endswith("\n")
    lines = [line for line in captured.err.splitlines() if "transformers" in line]
    assert lines == [f"dspark: {models.target.notices[0]}"]
    assert "runs through transformers, in bfloat16, not the faster native decoder" in lines[0]
    assert captured.out == ""


def test_the_implementation_can_be_asked_for(tmp_path: Path, checkpoint: Path) -> None:
    directory = save(tmp_path / "llama", tiny_config("llama", vocab_size=VOCABULARY_SIZE))
    native = load_target(str(directory), dtype="float32")
    adapted = load_target(str(directory), dtype="float32", implementation="transformers")
    assert isinstance(native.model, Decoder)
    assert native.implementation == "native"
    assert isinstance(adapted.model, TransformersTarget)
    assert adapted.implementation == "transformers"
    assert native.notices == adapted.notices == ()  # both are what was asked for
    torch.testing.assert_close(logits(adapted), logits(native), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="'mistral' is not one of the native families"):
        load_target(str(checkpoint), implementation="native")
    with pytest.raises(ValueError, match="implementation 'gguf' is not one of auto, native, transformers"):
        load_target(str(checkpoint), implementation="gguf")  # type: ignore[arg-type]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="a GGUF file runs natively only"):
        load_target(str(tmp_path / "model.gguf"), implementation="transformers")


def test_a_native_family_with_a_setting_that_is_not_goes_through_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    directory = save(tmp_path / "part", tiny_config("llama", vocab_size=VOCABULARY_SIZE, rope_parameters=rope))
    target = load_target(str(directory), dtype="float32")
    assert target.implementation == "transformers"
    assert target.notices[0].endswith("config.json: rope_parameters.partial_rotary_factor is not supported")


def test_types(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda device: device.type == "cuda")
    assert resolve_dtype("auto", "cpu", None) == "float32"
    assert resolve_dtype("auto", "cuda", None) == resolve_dtype("bfloat16", "cpu", None) == "bfloat16"
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda device: True)
    assert resolve_dtype("auto", "cpu", None) == "bfloat16"
    assert resolve_dtype("float32", "cpu", None) == "float32"
    rounded, exact = (load_target(str(checkpoint), dtype=dtype) for dtype in ("auto", "float32"))
    assert (rounded.model.compute_dtype, exact.model.compute_dtype) == ("bfloat16", "float32")
    assert rounded.model.dtype == rounded.model.lm_head_weight_VH.dtype == torch.bfloat16
    # One checkpoint, whatever it is computed in.
    assert rounded.model.fingerprint == exact.model.fingerprint
    half = save(tmp_path / "half", tiny_config("mistral", vocab_size=VOCABULARY_SIZE), torch.bfloat16)
    wide, narrow = (load_target(str(half), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert wide.model.dtype == torch.float32
    assert wide.model.fingerprint == narrow.model.fingerprint != exact.model.fingerprint
    for dtype in ("int8", "float16"):
        message = f"dtype {dtype} is not offered for model_type 'mistral', .* use float32 or bfloat16"
        with pytest.raises(ValueError, match=message):
            load_target(str(checkpoint), dtype=dtype)


def test_the_text_model_of_a_multimodal_checkpoint_is_taken(tmp_path: Path) -> None:
    text = tiny_config("gemma4_text", vocab_size=VOCABULARY_SIZE, vocab_size_per_layer_input=VOCABULARY_SIZE)
    assert isinstance(text, Gemma4TextConfig)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 1,
        "position_embedding_size": 16,
    }  # fmt: skip
    config = Gemma4Config(
        text_config=text.to_dict(), vision_config=vision, audio_config=None, image_token_id=7, eos_token_id=[2, 5]
    )
    directory = save(tmp_path / "gemma4", config)
    target = load_target(str(directory), dtype="float32")
    assert target.implementation == "transformers"
    assert "model_type 'gemma4' is not one of the native families" in target.notices[0]
    assert target.stop_token_ids >= {2, 5}
    assert target.model.config.num_layers == 4
    with torch.no_grad():
        expected = random_model(config)(input_ids=torch.arange(8, 28)[None]).logits[0]
    model = target.model
    output = model.forward(torch.arange(8, 28), [Segment(0, 0, 20)], model.new_cache(1, 20), (1,))
    torch.testing.assert_close(model.logits(output.hidden_NH), expected, atol=1e-4, rtol=0)


def test_what_is_wrong_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"1 tensors are missing for MistralForCausalLM, the first is {lost}"):
        load_target(str(checkpoint))
    save_file({**weights, "model.extra": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors are unexpected .* the first is model\.extra"):
        load_target(str(checkpoint))
    save_file(weights, file, {"format": "pt"})
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="its weights are damaged"):
        load_target(str(checkpoint))
    file.unlink()
    with pytest.raises(FileNotFoundError, match="only safetensors checkpoints are read"):
        load_target(str(checkpoint))
    edit_config(checkpoint, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="quantization_config is not supported"):
        load_target(str(checkpoint))
    edit_config(checkpoint, model_type="of-tomorrow")
    with pytest.raises(ValueError, match=r"model_type 'of-tomorrow' is not known to transformers \d"):
        load_target(str(checkpoint))
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling.Tomorrow"})
    with pytest.raises(ValueError, match=r"'of-tomorrow' needs code that comes with the checkpoint \(auto_map\)"):
        load_target(str(checkpoint))


def test_a_recurrent_checkpoint_is_refused_before_its_weights_are_read(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="mamba", num_hidden_layers=3)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model_type 'mamba' cannot be a target: .* recurrent state"):
        load_target(str(checkpoint))

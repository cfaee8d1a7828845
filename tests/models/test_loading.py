"""Checkpoint directories: whole, in shards, inside a multimodal one, and broken in every way that has a message."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.models.hardware import multiplies_bfloat16
from dspark.models.loading import load_target
from dspark.types import Segment
from tests.cli.tokenizer import character_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3-tiny-target"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    shutil.copytree(GOLDEN, directory)
    character_tokenizer().save_pretrained(directory)
    return directory


def logits(directory: Path) -> torch.Tensor:
    model = load_target(str(directory), dtype="float32").model
    return model.logits(model.forward(torch.arange(8), [Segment(0, 0, 8)], model.new_cache(1, 8)).hidden_NH)


def test_shards_are_the_whole(checkpoint: Path) -> None:
    whole = logits(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    shards = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(sorted(weights))}
    for file in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert torch.equal(logits(checkpoint), whole)
    (checkpoint / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors is missing"):
        load_target(str(checkpoint))


def test_of_a_path_only_its_end_is_shown(checkpoint: Path) -> None:
    target = load_target(str(checkpoint), dtype="float32")
    assert (target.name, target.public_name) == (str(checkpoint), "tiny")
    assert replace(target, name="owner/elsewhere").public_name == "owner/elsewhere"


def test_the_language_model_of_a_multimodal_checkpoint_is_taken(checkpoint: Path) -> None:
    whole = logits(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    nested = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file({**nested, "vision_tower.patches.weight": torch.zeros(2)}, checkpoint / "model.safetensors")
    assert torch.equal(logits(checkpoint), whole)


def test_what_is_wrong_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_target(str(checkpoint))
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_target(str(checkpoint))
    (checkpoint / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_target(str(checkpoint))
    with pytest.raises(FileNotFoundError, match="no such target"):
        load_target(str(tmp_path / "nowhere"))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"not a \.gguf"):
        load_target(str(tmp_path / "model.bin"))


def test_bfloat16_is_for_processors_that_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda", "mps"):
        assert multiplies_bfloat16(torch.device(device))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_bfloat16(torch.device("cpu"))

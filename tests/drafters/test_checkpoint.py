"""Drafter directories: what is written is what was read, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.drafters import TrainableDrafter, drafter_kind, greedy_sampler, load_drafter, save_drafter
from dspark.drafters.registry import drafter_from_target
from dspark.types import Segment

GOLDEN = Path(__file__).parents[1] / "golden"
DrafterOf = Callable[..., TrainableDrafter]
Edit = Callable[[dict[str, Tensor]], Any]


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dspark-vanilla", "dspark"),
        ("dspark-gated", "dspark"),
        ("dspark-rnn", "dspark"),
        ("dflash-anchor-first", "dflash"),
        ("eagle3", "eagle3"),
    ],
)
def test_golden_round_trip_is_byte_equal(name: str, kind: str, tmp_path: Path) -> None:
    drafter = load_drafter(GOLDEN / name)
    assert drafter_kind(drafter.config) == kind
    cache = drafter.new_cache(1, 8)
    taps = torch.randn(2, 64 * len(drafter.tap_layers))
    drafter.extend(cache, [Segment(0, 0, 2)], torch.tensor([1, 2]), taps)  # fuses the weights
    save_drafter(drafter, tmp_path / "copy", include_embeddings=True)
    before, after = load_file(GOLDEN / name / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(same_bytes(before[key], after[key]) for key in before)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("variant", ["gated", "eagle3", "mtp"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_tensors_of_the_target_may_be_left_out(
    variant: str, reduced: bool, include: bool, drafter_of: DrafterOf, target: Any, tmp_path: Path
) -> None:
    drafter = drafter_of(variant, reduced=reduced)
    save_drafter(drafter, tmp_path, include_embeddings=include)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("embed_tokens.weight" in stored) is include
    assert ("lm_head.weight" in stored) is (include or reduced)
    assert ("d2t" in stored) is ("t2d" in stored) is reduced
    again = load_drafter(tmp_path, target)
    assert type(again) is type(drafter)
    assert again.config == drafter.config
    state = again.state_dict()
    assert all(same_bytes(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    assert not again.embed_tokens.weight.requires_grad
    assert not again.lm_head.weight.requires_grad
    assert again.norm.weight.requires_grad
    if not include:
        with pytest.raises(ValueError, match=r"tensor embed_tokens.weight is missing; it is the target's"):
            load_drafter(tmp_path)


def test_tied_target_and_other_dtype(drafter_of: DrafterOf, target: Any, tmp_path: Path) -> None:
    drafter = drafter_of()
    drafter.lm_head.weight.data = drafter.embed_tokens.weight.data
    save_drafter(drafter, tmp_path, include_embeddings=True, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert load_drafter(tmp_path).dtype == torch.bfloat16
    again = load_drafter(tmp_path, dtype=torch.float32)
    assert again.dtype == torch.float32
    assert torch.equal(again.fc.weight, drafter.fc.weight.to(torch.bfloat16).float())


def test_other_files_survive_a_second_save(drafter_of: DrafterOf, tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{}")
    save_drafter(drafter_of("none"), tmp_path, include_embeddings=True)
    save_drafter(drafter_of("rnn"), tmp_path, include_embeddings=True)
    assert load_drafter(tmp_path, calibrated=False).config.markov_head_type == "rnn"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json", "config.json", "model.safetensors"]


def test_failed_save_leaves_the_old_checkpoint(
    drafter_of: DrafterOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(drafter_of("none"), tmp_path, include_embeddings=True)
    before = (tmp_path / "model.safetensors").read_bytes()

    def broken(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("dspark.drafters.checkpoint.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(drafter_of("rnn"), tmp_path, include_embeddings=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_reduced_vocabulary_without_its_head_or_membership_map(
    drafter_of: DrafterOf, target: Any, tmp_path: Path
) -> None:
    drafter = drafter_of(reduced=True)
    save_drafter(drafter, tmp_path, include_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: (tensors.pop("lm_head.weight"), tensors.pop("t2d")))
    again = load_drafter(tmp_path, target)
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight)
    assert torch.equal(again.t2d, drafter.t2d)
    with pytest.raises(ValueError, match=r"tensor lm_head.weight is missing"):
        load_drafter(tmp_path)


def test_nested_form_loads(drafter_of: DrafterOf, target: Any, tmp_path: Path) -> None:
    drafter = drafter_of("none", confidence=False, sample_from_anchor=False)
    save_drafter(drafter, tmp_path, include_embeddings=False)
    content = json.loads((tmp_path / "config.json").read_text())
    inside = {key: content.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    for key in ("sample_from_anchor", "draft_vocab_size", "markov_rank", "enable_confidence_head", "num_anchors"):
        content.pop(key)
    content |= {"architectures": ["DFlashDraftModel"], "dflash_config": inside, "block_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(content))
    again = load_drafter(tmp_path, target)
    assert again.config == drafter.config
    blocks = []
    for model in (drafter, again):
        cache = model.new_cache(1, 4)
        model.extend(cache, [Segment(0, 0, 3)], torch.zeros(3, dtype=torch.int64), torch.ones(3, 72))
        blocks.append(model.propose(cache, [0], torch.tensor([5]), greedy_sampler))
    assert torch.equal(blocks[0].tokens_RG, blocks[1].tokens_RG)
    assert blocks[0].confidence_logits_RG is None


def test_sharded_file(drafter_of: DrafterOf, tmp_path: Path) -> None:
    drafter = drafter_of()
    save_drafter(drafter, tmp_path, include_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_drafter(tmp_path).fc.weight, drafter.fc.weight)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b.safetensors: no such file"):
        load_drafter(tmp_path)


def edit_tensors(directory: Path, edit: Edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("eagle3", "layers.0.hidden_norm.weight"),
        ("eagle3", "fc.weight"),
        ("mtp", "eh_proj.weight"),
        ("mtp", "enorm.weight"),
        ("mtp", "hnorm.weight"),
    ],
)
def test_own_tensors_of_the_other_kinds_are_needed(
    variant: str, name: str, drafter_of: DrafterOf, tmp_path: Path
) -> None:
    save_drafter(drafter_of(variant), tmp_path, include_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensor {name} is missing; the file does not fit its config.json"):
        load_drafter(tmp_path)


def test_a_checkpoint_under_another_kinds_config(drafter_of: DrafterOf, tmp_path: Path) -> None:
    save_drafter(drafter_of("mtp"), tmp_path / "mtp", include_embeddings=True)
    save_drafter(drafter_of("eagle3"), tmp_path / "eagle3", include_embeddings=True)
    (tmp_path / "mtp" / "config.json").write_bytes((tmp_path / "eagle3" / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"model.safetensors: tensor fc.weight is missing \(and 1 more\)"):
        load_drafter(tmp_path / "mtp")


def put(name: str, tensor: Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("reduced", "edit", "message"),
    [
        (False, lambda t: t.pop("fc.weight"), "tensor fc.weight is missing; the file does not fit its config.json"),
        (
            False,
            lambda t: (t.pop("norm.weight"), t.pop("layers.1.mlp.up_proj.weight")),
            r"tensor layers.1.mlp.up_proj.weight is missing \(and 1 more\)",
        ),
        (False, put("draft_adapter.weight", torch.ones(1)), "tensor draft_adapter.weight is not known"),
        (
            False,
            put("fc.weight", torch.ones(24, 48)),
            r"tensor fc.weight has shape \[24, 48\], but config.json asks for \[24, 72\]",
        ),
        (False, put("lm_head.weight", torch.ones(12, 24)), r"tensor lm_head.weight has shape \[12, 24\]"),
        (False, put("norm.weight", torch.ones(24, dtype=torch.int8)), "tensor norm.weight is torch.int8; quantised"),
        (
            False,
            put("fc.weight", torch.ones(24, 72).to(torch.float8_e4m3fn)),
            "tensor fc.weight is torch.float8_e4m3fn; quantised",
        ),
        (
            False,
            put("d2t", torch.zeros(53, dtype=torch.int64)),
            "tensor d2t is present although draft_vocab_size equals",
        ),
        (True, lambda t: t.pop("d2t"), r"tensor d2t is missing although draft_vocab_size \(12\) is smaller"),
        (True, put("d2t", torch.zeros(11, dtype=torch.int64)), r"tensor d2t is torch.int64 of shape \[11\]"),
        (True, put("d2t", torch.zeros(12)), "tensor d2t is torch.float32"),
        (True, put("d2t", torch.full((12,), 50)), "names a token outside the target's vocabulary of 53"),
        (True, put("d2t", -torch.arange(12)), "names a token twice"),
        (True, put("t2d", torch.ones(53, dtype=torch.bool)), "tensor t2d does not mark the tokens that d2t names"),
    ],
)
def test_refused_tensors(reduced: bool, edit: Edit, message: str, drafter_of: DrafterOf, tmp_path: Path) -> None:
    save_drafter(drafter_of(reduced=reduced), tmp_path, include_embeddings=True)
    edit_tensors(tmp_path, edit)
    with pytest.raises(ValueError, match=rf"model.safetensors: .*{message}"):
        load_drafter(tmp_path)


@dataclass(frozen=True)
class Sizes:
    vocab_size: int = 53
    hidden_size: int = 24
    num_layers: int = 5


@pytest.mark.parametrize("variant", ["vanilla", "eagle3", "mtp"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(vocab_size=60), "vocab_size is 53 in the drafter but 60 in the target"),
        (Sizes(hidden_size=32), "hidden_size is 24 in the drafter but 32 in the target"),
        (Sizes(num_layers=6), "num_target_layers is 5 in the drafter but 6 in the target"),
    ],
)
def test_refused_targets(
    sizes: Sizes,
    message: str,
    variant: str,
    drafter_of: DrafterOf,
    config_of: Callable[..., Any],
    target: Any,
    tmp_path: Path,
) -> None:
    drafter = drafter_of(variant)
    save_drafter(drafter, tmp_path, include_embeddings=True)
    target.config = sizes
    with pytest.raises(ValueError, match=rf"config.json: {message}"):
        load_drafter(tmp_path, target)
    with pytest.raises(ValueError, match=message):
        drafter_from_target(config_of(variant), target)


def test_missing_and_broken_files(drafter_of: DrafterOf, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        load_drafter(tmp_path)
    save_drafter(drafter_of(), tmp_path, include_embeddings=True)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"model.safetensors: not a readable safetensors file"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: no such file"):
        load_drafter(tmp_path)
    for content in ("{oops", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"fc.weight": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"model.safetensors.index.json: holds no weight_map"):
            load_drafter(tmp_path)

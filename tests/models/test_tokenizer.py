"""A target's tokenizer without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.models import loading
from dspark.models.tokenizer import load_tokenizer
from tests.training.data.fakes import END, END_OF_TEXT, make_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    config = {"vocab_size": 300, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_directory_needs_no_weights(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_OF_TEXT]}))
    loaded = load_tokenizer(str(directory))
    assert (loaded.vocab_size, loaded.max_length, loaded.name) == (300, 77, str(directory))
    assert loaded.stop_token_ids == {END, END_OF_TEXT}
    assert loaded.tokenizer.get_vocab() == make_tokenizer().get_vocab()


def test_a_multimodal_config_has_them_one_level_down(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 1, "max_position_embeddings": 2}}))
    loaded = load_tokenizer(str(directory))
    assert (loaded.vocab_size, loaded.max_length) == (1, 2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_positions": 40, "vocab_size": 300}, (300, 40)),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, (262208, 131072)),
    ],
    ids=["another name", "the family's default"],
)
def test_sizes_that_a_published_config_says_otherwise(
    config: dict[str, object], expected: tuple[int, int], directory: Path
) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(str(directory))
    assert (loaded.vocab_size, loaded.max_length) == expected


def test_a_missing_number_is_named(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1}))
    with pytest.raises(ValueError, match=r"config\.json: max_position_embeddings must be a whole number"):
        load_tokenizer(str(directory))


def test_from_the_hub_only_small_files_are_fetched(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(directory)

    monkeypatch.setattr(loading, "snapshot_download", snapshot_download)
    assert load_tokenizer("owner/name").name == "owner/name"
    assert asked.keys() == {"owner/name"}
    assert not any("safetensors" in pattern or pattern == "*" for pattern in asked["owner/name"])


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such target"):
        load_tokenizer(str(tmp_path / "nowhere"))

"""A target's tokenizer and the few numbers of its config that making data needs: no weights are fetched or read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto import CONFIG_MAPPING

from dspark.models.embedded import NAME as EMBEDDED_NAME
from dspark.models.gguf_tokenizer import tokenizer_from_gguf
from dspark.models.loading import find_checkpoint, read_checkpoint_json, read_stop_token_ids


@dataclass(frozen=True, kw_only=True)
class TargetTokenizer:
    """A target as far as its tokenizer goes.

    Attributes:
        name: what to call the target in output.
        vocab_size: columns of its LM head.
        max_length: tokens that its context holds.
        stop_token_ids: tokens that end an answer (``eos_token_id`` of the generation config, config and tokenizer).
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    vocab_size: int
    max_length: int
    stop_token_ids: frozenset[int]


def load_tokenizer(name_or_path: str) -> TargetTokenizer:
    """Load the tokenizer of a target: ``embedded``, a directory, a ``.gguf`` file, or a hub name.

    A directory needs no weights: ``config.json`` and the tokenizer's files are enough.

    Raises:
        ValueError: if a file cannot be used, naming the field.
        OSError: if it cannot be found or fetched.
    """
    path = find_checkpoint(name_or_path, weights=False)
    name = EMBEDDED_NAME if name_or_path == "embedded" else name_or_path
    if path.is_file():
        return _from_gguf(path, name)
    raw = read_checkpoint_json(path / "config.json")
    vocab_size, max_length = _sizes(path, raw)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    generation = read_checkpoint_json(path / "generation_config.json", required=False)
    return TargetTokenizer(
        tokenizer=tokenizer,
        name=name,
        vocab_size=vocab_size,
        max_length=max_length,
        stop_token_ids=read_stop_token_ids(raw.get("text_config") or raw, generation, tokenizer),
    )


def _sizes(path: Path, raw: dict[str, Any]) -> tuple[int, int]:
    """Vocabulary and context; published configs leave out what is a family's default, or call it by another name."""
    text = raw.get("text_config") or raw
    sizes = {name: text.get(name) for name in ("vocab_size", "max_position_embeddings")}
    if None in sizes.values() and raw.get("model_type") in CONFIG_MAPPING:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True)
        sizes = {name: getattr(config, name, None) for name in sizes}
    vocab_size, max_length = (_whole_number(path, name, value) for name, value in sizes.items())
    return vocab_size, max_length


def _whole_number(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{path / 'config.json'}: {name} must be a whole number, got {value!r}")
    return value


def _from_gguf(path: Path, name: str) -> TargetTokenizer:
    try:
        reader = gguf.GGUFReader(path)
        metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if not isinstance(length, int) or "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(f"{path}: the keys <architecture>.context_length and tokenizer.ggml.tokens must be there")
    tokenizer = tokenizer_from_gguf(metadata, path)
    raw = {"eos_token_id": metadata.get("tokenizer.ggml.eos_token_id")}
    return TargetTokenizer(
        tokenizer=tokenizer,
        name=name,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        max_length=length,
        stop_token_ids=read_stop_token_ids(raw, {}, tokenizer),
    )

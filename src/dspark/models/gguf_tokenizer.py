"""Rebuild a byte-level BPE tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4
# Split patterns by the name that llama.cpp gives them; the byte-level step follows each.
_SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            behavior="isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            behavior="isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def tokenizer_from_gguf(metadata: dict[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer, with its special tokens and chat template.

    Raises:
        ValueError: if the vocabulary is not byte-level BPE or its split rule is not known here.
    """
    model, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or split not in _SPLITS:
        raise ValueError(
            f"{path}: tokenizer.ggml.model {model!r} with tokenizer.ggml.pre {split!r} is not supported "
            f"(byte-level BPE, one of {sorted(_SPLITS)}); use the Hugging Face checkpoint"
        )
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        if key not in metadata:
            raise ValueError(f"{path}: the key {key} is missing")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"{path}: tokenizer.ggml.tokens and tokenizer.ggml.merges do not fit ({error})") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED]
    )

    special = {
        f"{role}_token": tokens[metadata[key]]
        for role, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    wrapped.chat_template = metadata.get("tokenizer.chat_template")
    return wrapped

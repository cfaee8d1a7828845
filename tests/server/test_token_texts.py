"""Tokens as text, and where they begin."""

from __future__ import annotations

import pytest

from dspark.server.token_texts import TextOffsets, TokenTexts
from tests.server.byte_tokenizer import END, VOCABULARY_SIZE, byte_tokenizer


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(byte_tokenizer(), VOCABULARY_SIZE + 10)


def test_bytes_and_texts(texts: TokenTexts) -> None:
    assert texts.bytes_of(65) == b"A"
    assert texts.text_of(65) == "A"
    assert texts.bytes_of(0xC3) == b"\xc3"
    assert texts.text_of(0xC3) == "bytes:\\xc3"
    assert texts.text_of(END) == "<end>"
    assert texts.is_special(END)
    assert not texts.is_special(65)


def test_columns_without_a_token(texts: TokenTexts) -> None:
    assert texts.text_of(VOCABULARY_SIZE + 3) == ""
    assert texts.is_special(VOCABULARY_SIZE + 3)


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [
        ([b"a", b"bc", b"d"], [0, 1, 3]),
        ([b"a", "é".encode()[:1], "é".encode()[1:], b"b"], [0, 1, 1, 2]),
        ([b"\xe8", b";", b"Z"], [0, 1, 2]),
        ([b"a", b"", b"b"], [0, 1, 1]),
        (["🙂".encode()[:1], "🙂".encode()[1:3], "🙂".encode()[3:] + b"x", b"y"], [0, 0, 0, 2]),
    ],
)
def test_offsets(tokens: list[bytes], starts: list[int]) -> None:
    offsets = TextOffsets()
    assert [offsets.push(token) for token in tokens] == starts
    assert offsets.position == len(b"".join(tokens).decode(errors="replace"))

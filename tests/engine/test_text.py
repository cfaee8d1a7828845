"""Incremental text: whole characters, no stop string, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.engine.text import IncrementalText


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII comes in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_tokenizer()


@given(st.text(alphabet="ab é中🙂\n", max_size=30))
def test_pieces_add_up_and_are_whole_characters(text: str) -> None:
    incremental = IncrementalText(TOKENIZER)
    pieces = [incremental.push(token) for token in TOKENIZER(text)["input_ids"]]
    assert all("�" not in piece for piece in pieces)
    assert "".join(pieces) + incremental.finish() == text == incremental.text


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_at_their_first_completion(text: str, stops: list[str]) -> None:
    incremental = IncrementalText(TOKENIZER, stops)
    shown = ""
    for token in TOKENIZER(text)["input_ids"]:
        shown += incremental.push(token)
        assert not any(stop in shown for stop in stops)
        if incremental.stopped:
            break
    shown += incremental.finish()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert not incremental.stopped
        assert shown == text
    else:
        # The stop string that is complete first wins; of several complete at once, the longest.
        first = min(ends)
        assert shown == text[: min(text.index(s) for s in stops if s in text and text.index(s) + len(s) == first)]


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    incremental = IncrementalText(TOKENIZER)
    first = TOKENIZER("é")["input_ids"][0]
    assert incremental.push(first) == ""
    assert incremental.finish() == "�"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        IncrementalText(TOKENIZER, [""])


def test_a_stop_string_before_an_unfinished_character_is_not_shown() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, ".Ã"])}  # one token: a full stop and half an é
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(".", "Ã")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    incremental = IncrementalText(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ["b."])
    shown = "".join(incremental.push(vocabulary[token]) for token in ("a", "b", ".Ã"))
    assert shown + incremental.finish() == incremental.text == "a"
    assert incremental.stopped


class CountingTokenizer:
    """Counts the tokens that were decoded."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: object) -> str:
        self.decoded += len(token_ids)
        return str(TOKENIZER.decode(token_ids, **options))


@given(st.binary(min_size=1, max_size=60))
def test_bytes_that_are_no_text_come_out_as_they_would_together(data: bytes) -> None:
    tokens = [TOKENIZER.convert_tokens_to_ids(byte_symbol(byte)) for byte in data]
    incremental = IncrementalText(TOKENIZER)
    text = "".join(incremental.push(token) for token in tokens) + incremental.finish()
    assert text == TOKENIZER.decode(tokens)


def test_an_answer_without_a_whole_character_costs_each_token_the_same() -> None:
    tokenizer = CountingTokenizer()
    incremental = IncrementalText(tokenizer)  # type: ignore[arg-type]
    token = TOKENIZER("é")["input_ids"][0]
    shown = "".join(incremental.push(token) for _ in range(1000))
    assert len(shown) >= 990
    assert tokenizer.decoded < 20_000


def byte_symbol(byte: int) -> str:
    """The symbol that stands for a byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [other for other in range(256) if other not in shown]
    return chr(byte) if byte in shown else chr(256 + hidden.index(byte))

"""Prompts from files, and their token ids."""

from __future__ import annotations

import json

import pytest

from dspark.cli.prompts import Prompt, read_prompts
from dspark.models.chat import chat_token_ids, text_token_ids
from tests.cli.tokenizer import character_tokenizer


def test_reads_turns_and_skips_empty_lines(prompts_file):
    first, second = read_prompts(prompts_file)
    assert (first.turns, first.domain) == (("one and two",), "math")
    assert (second.turns, second.domain) == (("first", "then"), "")


def test_reads_messages_as_training_data_does(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "left out"},
        {"role": "user", "content": "and?"},
    ]
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    assert read_prompts(path) == [Prompt(turns=("hi", "and?"), system="be kind")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: not JSON"),
        ('{"prompt": "hi"}', 'line 2: has neither "turns" nor "messages"'),
        ('{"turns": []}', "line 2: turns must be a list"),
        ('{"turns": [3]}', "line 2: turns must be a list"),
        ('["hi"]', "line 2: must be a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"turns": ["hi"]}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2")
    assert '{"turns": ["What is 2 + 2?"]}' in str(error.value)


def test_an_empty_file_is_an_error(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt in it"):
        read_prompts(path)


def test_chat_ends_where_the_answer_begins():
    tokenizer = character_tokenizer()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert tokenizer.decode(chat_token_ids(tokenizer, messages)) == "<s>be kind<u>hi<a>"


def test_raw_text_is_taken_as_it_is():
    tokenizer = character_tokenizer()
    assert tokenizer.decode(text_token_ids(tokenizer, "one\n two")) == "one\n two"


def test_no_chat_template_names_the_remedy():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--raw"):
        chat_token_ids(tokenizer, [{"role": "user", "content": "hi"}])

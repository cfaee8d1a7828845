from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.training.data.conversations import Conversation, read_conversations
from tests.training.data.fakes import write_prompts


def test_conversations_keep_what_the_user_and_the_system_say(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    first, second, *_ = read_conversations(tmp_path / "prompts.jsonl")
    assert first == Conversation(user_turns=("How many?", "And then?", "Is that all?"))
    assert second == Conversation(user_turns=("Why?", "Why not?"), system="Be brief.")


def test_a_file_may_end_without_a_line_break(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a"]}\n\n{"turns": ["b"]}')
    assert [conversation.user_turns for conversation in read_conversations(file)] == [("a",), ("b",)]


def messages(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "must be a JSON object"),
        ({"prompt": "Hi"}, 'neither "turns" nor "messages"'),
        ({"turns": []}, "at least one non-empty user message"),
        ({"turns": ["Hi", " "]}, "at least one non-empty user message"),
        ({"messages": ["Hi"]}, "messages must be a list of objects"),
        (messages(("user", None)), r"messages\[0\]\.content must be a string"),
        (messages(("user", "a"), ("user", "b")), r"messages\[1\]\.role is 'user' after 'user'"),
        (messages(("assistant", "a")), r"messages\[0\]\.role is 'assistant' after 'nothing'"),
        (messages(("user", "a"), ("system", "b")), r"messages\[1\]\.role is 'system'"),
        (messages(("user", "a"), ("tool", "b")), r"messages\[1\]\.role is 'tool'"),
        (messages(("system", "a")), "no user message"),
        ({"turns": ["fine", "a\ud800b"]}, r"turns\[1\] holds '\\ud800', which is half a character"),
        (messages(("system", "\udfff"), ("user", "b")), r"messages\[0\]\.content holds '\\udfff'"),
    ],
)
def test_a_wrong_prompt_line_is_named(tmp_path: Path, record: Any, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["fine"]}\n' + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: .*" + message):
        list(read_conversations(file))


def test_a_domain_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a"], "domain": "math", "id": 3}\n')
    assert list(read_conversations(file)) == [Conversation(user_turns=("a",), domain="math")]
    file.write_text('{"turns": ["a"], "domain": 3}\n')
    with pytest.raises(ValueError, match=r"line 1: domain must be a string"):
        list(read_conversations(file))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"prompts\.jsonl: no prompt in it; a line is an object like"):
        list(read_conversations(file))


@pytest.mark.parametrize("torn", ['{"turns": ["to', '"]}', "\x00\x00\x00", "[" * 100_000])
def test_a_torn_line_in_the_middle_is_named(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["a"]}\n' + torn + '\n{"turns": ["b"]}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: not JSON"):
        list(read_conversations(file))

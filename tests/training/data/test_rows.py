from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dspark.training.data.rows import DataRow, DroppedRow, iterate_rows, read_rows
from tests.training.data.fakes import make_settings, run

ROW: dict[str, Any] = {
    "id": "self-math/000123",
    "source": "self-math",
    "token_ids": [1, 2, 3, 4, 5, 6, 7],
    "response_spans": [[2, 4], [6, 7]],
    "finish_reasons": ["stop", "length"],
    "temperature": 0.7,
}


def line(**changes: Any) -> str:
    return json.dumps({key: value for key, value in (ROW | changes).items() if value is not None})


def test_a_row_survives_its_json() -> None:
    row = DataRow.from_json(line(user_turns=["Schrödinger\nasks", "again"], more="left aside"))
    assert row.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert row.response_tokens == 3
    assert "\n" not in row.to_json()
    assert DataRow.from_json(row.to_json()) == row
    dropped = DroppedRow(id="a/1", source="a", reason="because", user_turns=("Hi",))
    assert DroppedRow.from_json(dropped.to_json()) == dropped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": None}, "id is missing"),
        ({"source": 3}, "source must be a string"),
        ({"token_ids": [1, "2"]}, "token_ids must be a list of integers"),
        ({"token_ids": [1, True]}, "token_ids must be a list of integers"),
        ({"token_ids": [-1] * 7}, "negative id -1"),
        ({"response_spans": []}, "at least one answer"),
        ({"response_spans": [[2, 4], [3, 7]]}, "in order, disjoint"),
        ({"response_spans": [[2, 2], [6, 7]]}, "must be non-empty"),
        ({"response_spans": [[2, 4], [6, 8]]}, "inside its 7 tokens"),
        ({"response_spans": [[2, 4, 5]]}, r"\[start, end\] pairs"),
        ({"finish_reasons": ["stop"]}, "1 entries for 2 response_spans"),
        ({"finish_reasons": [None, None]}, "finish_reasons must be a list of strings"),
        ({"temperature": "warm"}, "temperature must be a number"),
        ({"user_turns": "Hi"}, "user_turns must be a list"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataRow.from_json(line(**changes))


def test_shards_are_read_in_order_and_a_torn_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "rows-00001.jsonl").write_text(line(id="c") + "\n" + line(id="torn")[:-9])
    (tmp_path / "rows-00000.jsonl").write_text(line(id="a") + "\n" + line(id="b") + "\n")
    (tmp_path / "dropped.jsonl").write_text("{}\n")
    assert [row.id for row in iterate_rows(tmp_path)] == ["a", "b", "c"]
    assert [row.id for row in read_rows(tmp_path / "rows-00001.jsonl")] == ["c"]


def test_an_unreadable_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows-00000.jsonl"
    file.write_text(line() + "\n{oops\n")
    with pytest.raises(ValueError, match=r"rows-00000\.jsonl, line 2: not JSON"):
        read_rows(tmp_path)
    file.write_text(line() + "\n")
    with pytest.raises(ValueError, match="line 1: token_ids has the id 7, but the target's vocabulary has 7"):
        read_rows(tmp_path, vocab_size=7)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="dspark data"):
        read_rows(tmp_path / "empty")


def test_an_empty_shard_adds_nothing_and_empty_shards_alone_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows-00000.jsonl").touch()
    with pytest.raises(ValueError, match="has no rows yet"):
        read_rows(tmp_path)
    (tmp_path / "rows-00001.jsonl").write_text(line() + "\n")
    assert len(read_rows(tmp_path)) == 1


def test_a_shard_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=20))
    file = tmp_path / "rows-00000.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for size in (len(b"".join(lines[:-1])), len(b"".join(lines)) - 5, 0):
        os.truncate(file, size)
        with pytest.raises(ValueError, match=rf"counts {len(lines)}: a rows-\*\.jsonl was cut short"):
            read_rows(tmp_path)
    run(tmp_path, settings=make_settings(rows=20))
    assert {row.to_json() for row in read_rows(tmp_path)} == {text.decode().strip() for text in lines}
    file.write_bytes(file.read_bytes() + lines[0].replace(b"/00000", b"/10000"))  # a manifest may lag behind
    assert len(read_rows(tmp_path)) == len(lines) + 1

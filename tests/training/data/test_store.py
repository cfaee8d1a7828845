from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dspark.training.data.rows import DataRow, DroppedRow, read_rows
from dspark.training.data.store import RowStore
from tests.training.data import fakes


def row(number: int) -> DataRow:
    return DataRow(
        id=f"s/{number}", source="s", token_ids=(1, 2, 3), response_spans=((1, 3),), finish_reasons=("stop",),
        temperature=0.0,
    )  # fmt: skip


def test_shards_follow_each_other_over_reopening(tmp_path: Path) -> None:
    for start in (0, 5):
        with RowStore(tmp_path, rows_per_shard=3) as store:
            for number in range(start, start + 5):
                store.append(row(number))
    assert [file.name for file in sorted(tmp_path.glob("rows-*"))] == [
        f"rows-0000{number}.jsonl" for number in range(4)
    ]
    assert [data.id for data in read_rows(tmp_path)] == [f"s/{number}" for number in range(10)]
    with RowStore(tmp_path) as store:
        assert store.tally.rows == store.tally.done == 10
        assert store.tally.response_tokens == 20
        assert set(store.recovered) == {f"s/{number}" for number in range(10)}


def test_torn_last_lines_are_cut_off_at_every_length(tmp_path: Path) -> None:
    whole = row(0).to_json() + "\n"
    torn = row(1).to_json()
    file = tmp_path / "rows-00000.jsonl"
    for length in range(len(torn) + 1):
        file.write_text(whole + torn[:length])
        with RowStore(tmp_path) as store:
            assert set(store.recovered) == {"s/0"}
            assert store.torn_lines == (length > 0)
            store.append(row(2))
        assert [data.id for data in read_rows(tmp_path)] == ["s/0", "s/2"]


def test_dropped_rows_are_remembered_with_their_reason(tmp_path: Path) -> None:
    with RowStore(tmp_path) as store:
        store.append(DroppedRow(id="s/1", source="s", reason="why", user_turns=("Hi",)))
    with RowStore(tmp_path) as store:
        assert store.recovered == {"s/1": (("Hi",), "why")}
        assert store.tally.to_dict()["dropped"] == {"why": 1}


def test_a_damaged_line_or_a_doubled_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows-00000.jsonl"
    file.write_text(row(0).to_json() + "\n" + "garbage\n" + row(1).to_json() + "\n")
    with pytest.raises(ValueError, match=r"rows-00000\.jsonl, line 2: not JSON"):
        RowStore(tmp_path)
    file.write_text(2 * (row(0).to_json() + "\n"))
    with pytest.raises(ValueError, match="line 2: row s/0 is there twice"):
        RowStore(tmp_path)
    file.write_text("")
    RowStore(tmp_path).close()  # the lock was given back


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with RowStore(tmp_path), pytest.raises(BlockingIOError, match="another process"):
        RowStore(tmp_path)
    RowStore(tmp_path).close()


class TestFullDisk:
    """``write`` fails as on a disk without room, after part of a line."""

    @pytest.fixture
    def room(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Bytes left on the disk, to be set."""
        left = [10**9]
        write = os.write

        def full(descriptor: int, content: bytes) -> int:
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write(descriptor, content[: left[0]])
            left[0] -= written
            return written

        monkeypatch.setattr(os, "write", full)
        return left

    def test_what_is_finished_is_kept_and_the_directory_named(self, tmp_path: Path, room: list[int]) -> None:
        with RowStore(tmp_path) as store:
            store.append(row(0))
            room[0] = 20
            with pytest.raises(
                OSError, match=rf"{tmp_path} could not be written \(No space left .*: make room there\); its 1 "
            ):
                store.append(row(1))
            assert store.tally.rows == 1
            assert [data.id for data in read_rows(tmp_path)] == ["s/0"]
            room[0] = 10**9
            store.append(row(2))
        with RowStore(tmp_path) as store:
            assert set(store.recovered) == {"s/0", "s/2"}
            assert store.torn_lines == 0

    def test_a_run_goes_on_when_there_is_room_again(self, tmp_path: Path, room: list[int]) -> None:
        fakes.run(tmp_path / "whole")
        room[0] = 4000
        with pytest.raises(OSError, match="the same command goes on from there"):
            fakes.run(tmp_path / "out")
        room[0] = 10**9
        done = len(read_rows(tmp_path / "out"))
        assert 0 < done < 40
        assert fakes.run(tmp_path / "out").manifest["complete"]
        assert {data.to_json() for data in read_rows(tmp_path / "out")} == {
            data.to_json() for data in read_rows(tmp_path / "whole")
        }

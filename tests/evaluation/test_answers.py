from __future__ import annotations

import pytest

from dspark.evaluation.answers import AnswerLog, Record
from tests.evaluation.made import answer, record, round_of

SETTINGS = {"target": "tiny", "temperature": 0.0, "arms": ("a", "b")}
ROUNDS = [round_of(2, logits=(0.5, -1.25, 3.0)), round_of(0, drafted=0)]
FIRST = record("d", "p", answer(ROUNDS, text="naïve\u2028 text"))
SECOND = Record(arm="d", prompt_id="q", turn=1, skipped="too long")


def test_a_record_survives_the_file():
    for one in (FIRST, SECOND):
        line = one.to_json()
        assert "\n" not in line
        assert Record.from_json(line) == one


def test_a_log_goes_on_where_it_was(tmp_path):
    with AnswerLog.opened(tmp_path, SETTINGS) as log:
        log.start_session({"commit": "one"})
        log.add(FIRST)
        log.add(SECOND)
    with AnswerLog.opened(tmp_path, SETTINGS) as log:
        log.start_session({"commit": "two"})
        assert log.records == (FIRST, SECOND)
        assert log.get("d", "p", 0) == FIRST
        assert log.get("d", "p", 1) is None
        assert [session["commit"] for session in log.sessions] == ["one", "two"]


def test_a_torn_last_line_is_forgotten(tmp_path):
    with AnswerLog.opened(tmp_path, SETTINGS) as log:
        log.add(FIRST)
        log.add(SECOND)
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with AnswerLog.opened(tmp_path, SETTINGS) as log:
        assert log.records == (FIRST,)
        log.add(SECOND)
    with AnswerLog.opened(tmp_path, SETTINGS) as log:
        assert log.records == (FIRST, SECOND)


def test_a_damaged_line_is_named(tmp_path):
    with AnswerLog.opened(tmp_path, SETTINGS) as log:
        log.add(FIRST)
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1"), AnswerLog.opened(tmp_path, SETTINGS):
        pass


def test_other_settings_are_refused_by_name(tmp_path):
    with AnswerLog.opened(tmp_path, SETTINGS):
        pass
    changed = SETTINGS | {"temperature": 1.0, "seed": 3}
    with pytest.raises(ValueError, match=r"other settings \(seed, temperature\)"), AnswerLog.opened(tmp_path, changed):
        pass


def test_damaged_settings_are_an_error(tmp_path):
    (tmp_path / "settings.json").write_text("[1]")
    with pytest.raises(ValueError, match="damaged"), AnswerLog.opened(tmp_path, SETTINGS):
        pass


def test_two_writers_are_one_too_many(tmp_path):
    with (
        AnswerLog.opened(tmp_path, SETTINGS),
        pytest.raises(BlockingIOError, match="another process"),
        AnswerLog.opened(tmp_path, SETTINGS),
    ):
        pass


def test_without_a_directory_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with AnswerLog.opened(None, SETTINGS) as log:
        log.start_session({})
        log.add(FIRST)
        assert log.records == (FIRST,)
    assert list(tmp_path.iterdir()) == []

"""Data sets of the hub; the ones here lie in a directory of the same name, which ``datasets`` opens the same way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.training.data.conversations import Conversation
from dspark.training.data.hub import HubDataset, parse_rows, prompt_column, read_hub
from dspark.training.data.prompts import parse_sources
from tests.training.data.fakes import make_settings, run

DATASET = HubDataset(name="owner/name")


def messages(*pairs: tuple[str, str], keys: tuple[str, str] = ("role", "content")) -> list[dict[str, str]]:
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``owner/name`` with a split ``train`` of five rows, one of them without a prompt, and a split ``test``."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "owner" / "name"
    directory.mkdir(parents=True)
    rows = [{"question": text, "answer": "left out"} for text in ("one?", "two?", " ", "four?", "five?")]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "test.jsonl").write_text(json.dumps({"question": "one?", "answer": "another one?"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hub:a/b", HubDataset(name="a/b")),
        ("hub:a/b:test", HubDataset(name="a/b", split="test")),
        ("hub:a/b.c/main:test:question", HubDataset(name="a/b.c", subset="main", split="test", column="question")),
    ],
)
def test_a_spec_names_subset_split_and_column(spec: str, expected: HubDataset) -> None:
    assert HubDataset.parse(spec) == expected
    assert HubDataset.parse(str(expected)) == expected


@pytest.mark.parametrize("spec", ["hub:", "hub:name", "hub:a/b/c/d", "hub:a/b:", "hub:a/b:x:y:z", "hub:../b c"])
def test_a_wrong_spec_is_shown_the_form(spec: str) -> None:
    with pytest.raises(ValueError, match=r"hub:OWNER/NAME\[/SUBSET\]\[:SPLIT\]\[:COLUMN\]"):
        HubDataset.parse(spec)


def test_the_column_is_found_by_name_or_the_columns_are_listed() -> None:
    assert prompt_column(["id", "prompt", "messages"], DATASET) == "messages"
    assert prompt_column(["id", "instruction", "input"], DATASET) == "instruction"
    with pytest.raises(ValueError, match=r"its columns are id, text: name the one .* hub:owner/name:train:COLUMN"):
        prompt_column(["id", "text"], DATASET)
    named = HubDataset(name="owner/name", column="text")
    assert prompt_column(["id", "text"], named) == "text"
    with pytest.raises(ValueError, match="has no column text; its columns are id, prompt"):
        prompt_column(["id", "prompt"], named)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "How?"}, Conversation(user_turns=("How?",))),
        ({"instruction": "Sum up.", "input": "Text."}, Conversation(user_turns=("Sum up.\n\nText.",))),
        ({"instruction": "Sum up.", "input": ""}, Conversation(user_turns=("Sum up.",))),
        ({"turns": ["a", "b"]}, Conversation(user_turns=("a", "b"))),
        (
            {"messages": messages(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))},
            Conversation(user_turns=("a", "c"), system="s"),
        ),
        (
            {"conversations": messages(("human", "a"), ("gpt", "b"), keys=("from", "value"))},
            Conversation(user_turns=("a",)),
        ),
        ({"prompt": messages(("user", "a"))}, Conversation(user_turns=("a",))),
    ],
)
def test_rows_of_the_common_forms(row: dict[str, Any], expected: Conversation) -> None:
    (column, *_) = row
    assert parse_rows([row], column=column, dataset=DATASET).conversations == (expected,)


def test_rows_without_a_usable_prompt_are_counted() -> None:
    prompts = ["", None, ["a"], messages(("gpt", "a")), "\ud800", "fine"]
    rows = [{"prompt": prompt} for prompt in prompts]
    read = parse_rows(rows, column="prompt", dataset=DATASET)
    assert (read.conversations, read.unusable) == ((Conversation(user_turns=("fine",)),), 5)
    with pytest.raises(
        ValueError, match="none of its 5 rows can be used; of the first, prompt must be a list of at least"
    ):
        parse_rows(rows[:5], column="prompt", dataset=DATASET)


def test_a_data_set_is_read_from_the_front(hub: Path) -> None:
    read = read_hub(DATASET)
    assert [conversation.user_turns[0] for conversation in read.conversations] == ["one?", "two?", "four?", "five?"]
    assert (read.column, read.unusable) == ("question", 1)
    assert len(read_hub(DATASET, max_rows=2).conversations) == 2


def test_rows_are_made_from_it(hub: Path, tmp_path: Path) -> None:
    (source,) = parse_sources(["hub:owner/name=2"])
    result = run(tmp_path / "out", sources=[source], settings=make_settings(rows=4))
    described = result.manifest["recipe"]["sources"]["owner--name"]
    assert described["kind"] == "hub"
    assert described["dataset"] == "hub:owner/name:train:question"
    assert (described["prompts"], described["unusable"], described["share"]) == (4, 1, 2.0)
    (hub / "train.jsonl").write_text('{"question": "another?", "answer": ""}\n')
    with pytest.raises(ValueError, match=r"sources\.owner--name\.(prompts|sha256)"):
        run(tmp_path / "out", sources=parse_sources(["hub:owner/name=2"]), settings=make_settings(rows=4))


def test_a_split_and_a_column_can_be_named(hub: Path) -> None:
    (source,) = parse_sources(["hub:owner/name:test:answer"])
    assert [conversation.user_turns for conversation in source.conversations] == [("another one?",)]


def test_an_unknown_split_or_subset_is_an_error(hub: Path) -> None:
    with pytest.raises(ValueError, match=r"hub:owner/name:dev cannot be opened: .*(dev|split).*the form is"):
        parse_sources(["hub:owner/name:dev"])
    with pytest.raises(ValueError, match=r"cannot be opened: .*main.*the form is"):
        parse_sources(["hub:owner/name/main"])


def test_files_that_do_not_fit_together_are_an_error(hub: Path) -> None:
    (hub / "test.jsonl").write_text('{"question": "one?", "more": 3}\n')
    with pytest.raises(ValueError, match="hub:owner/name:test cannot be read, its files do not fit together"):
        parse_sources(["hub:owner/name:test"])


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'dspark\[hub\]'"):
        parse_sources(["hub:owner/name"])


@pytest.mark.parametrize("broken_after", [0, 2])
def test_without_a_network_it_says_so(monkeypatch: pytest.MonkeyPatch, broken_after: int) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        if not broken_after:
            raise ConnectionError("Couldn't reach the Hub")
        return failing()

    def failing() -> Any:
        yield from [{"prompt": "a"}] * broken_after
        raise RuntimeError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = (
        "could not be read to the end .connection reset" if broken_after else "could not be reached .Couldn't reach"
    )
    with pytest.raises(OSError, match=message):
        parse_sources(["hub:owner/name"])

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.training.data import check_data_tokenizer, read_manifest, tokenizer_sha256
from tests.training.data.fakes import CHATML, make_settings, make_tokenizer, run


def change_manifest(directory: Path, **changes: object) -> None:
    manifest = read_manifest(directory)
    for name, value in changes.items():
        if value is None:
            del manifest["recipe"]["target"][name]
        else:
            manifest["recipe"]["target"][name] = value
    (directory / "manifest.json").write_text(json.dumps(manifest))


def another_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["another"])
    return tokenizer


def test_the_hash_is_of_tokens_ids_and_what_is_special() -> None:
    assert tokenizer_sha256(make_tokenizer()) == tokenizer_sha256(make_tokenizer(None))
    special = make_tokenizer()
    special.add_special_tokens({"additional_special_tokens": ["a"]}, replace_extra_special_tokens=False)
    hashes = {tokenizer_sha256(tokenizer) for tokenizer in (make_tokenizer(), another_tokenizer(), special)}
    assert len(hashes) == 3


def test_the_tokenizer_that_made_the_rows_passes(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=5))
    assert read_manifest(tmp_path)["recipe"]["target"]["tokenizer_sha256"] == tokenizer_sha256(make_tokenizer())
    assert check_data_tokenizer(tmp_path, make_tokenizer(), 259) is None


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=5))
    with pytest.raises(
        ValueError, match=r"made with another tokenizer \(by fake, vocabulary of 259; this one has 260\)"
    ):
        check_data_tokenizer(tmp_path, another_tokenizer(), 260)


def test_another_template_is_said(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=5))
    notice = check_data_tokenizer(tmp_path, make_tokenizer(CHATML + " "), 259)
    assert notice is not None
    assert "another chat template" in notice


def test_of_older_data_only_the_template_is_known(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=5))
    change_manifest(tmp_path, tokenizer_sha256=None)
    notice = check_data_tokenizer(tmp_path, another_tokenizer(), 260)
    assert notice is not None
    assert "did not record the tokenizer" in notice
    with pytest.raises(ValueError, match="another chat template"):
        check_data_tokenizer(tmp_path, make_tokenizer(CHATML + " "), 259)


def test_older_data_is_extended_and_stays_unclaimed(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=5))
    change_manifest(tmp_path, tokenizer_sha256=None, endpoint=None)
    assert run(tmp_path, settings=make_settings(rows=9)).manifest["complete"]
    assert "tokenizer_sha256" not in read_manifest(tmp_path)["recipe"]["target"]
    run(tmp_path, settings=make_settings(rows=9))


def test_rows_of_another_tokenizer_are_not_extended(tmp_path: Path) -> None:
    run(tmp_path, settings=make_settings(rows=5))
    change_manifest(tmp_path, tokenizer_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"target\.tokenizer_sha256 was '000"):
        run(tmp_path, settings=make_settings(rows=5))


def test_files_without_a_manifest_are_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for place in (tmp_path, tmp_path / "rows.jsonl"):
        notice = check_data_tokenizer(place, make_tokenizer(), 259)
        assert notice is not None
        assert "it is not known which tokenizer" in notice

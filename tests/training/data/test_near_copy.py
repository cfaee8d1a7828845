from __future__ import annotations

import pytest

from dspark.training.data.near_copy import BOILERPLATE_PROMPTS, NearCopyGuard, NearDuplicateIndex

QUESTION = "A farmer has twelve cows and sells a third of them, how many are left?"


def test_a_shared_run_of_words_is_a_near_copy() -> None:
    guard = NearCopyGuard([QUESTION], ngram_words=8)
    assert guard.is_near_copy(QUESTION)
    assert guard.is_near_copy("So: a FARMER has twelve cows, and sells a\nthird today.")
    assert not guard.is_near_copy("A farmer has twelve cows and buys a third of them, how many are there?")
    assert not guard.is_near_copy("")
    assert not NearCopyGuard([QUESTION], ngram_words=13).is_near_copy(
        "A farmer has twelve cows and sells a third of it"
    )


def test_short_forbidden_prompts_are_looked_for_as_a_whole() -> None:
    guard = NearCopyGuard(["Reverse a linked list", "Hello", "..."], ngram_words=8)
    assert guard.is_near_copy("Please reverse a linked list for me")
    assert not guard.is_near_copy("Reverse a list")
    assert guard.is_near_copy("hello!")
    assert not guard.is_near_copy("Hello, can you help?")


def test_common_wording_of_the_forbidden_prompts_does_not_count() -> None:
    instruction = "Please reason step by step, and put your final answer within the box."
    forbidden = [
        f"Question about item{number} with its own words item{number}. {instruction}"
        for number in range(BOILERPLATE_PROMPTS)
    ]
    guard = NearCopyGuard(forbidden, ngram_words=8)
    assert not guard.is_near_copy(f"Something else. {instruction}")
    assert guard.is_near_copy("question about item3 with its own words item3")
    assert NearCopyGuard(forbidden[1:], ngram_words=8).is_near_copy(instruction)


def test_a_guard_without_prompts_lets_everything_pass() -> None:
    assert not NearCopyGuard([]).is_near_copy(QUESTION)
    with pytest.raises(ValueError, match="ngram_words"):
        NearCopyGuard([], ngram_words=0)


def test_near_duplicates_share_most_of_their_wording() -> None:
    index = NearDuplicateIndex(similarity=0.7)
    assert not index.is_near_duplicate(QUESTION)
    index.add(QUESTION)
    index.add("Hi there")
    assert index.is_near_duplicate(QUESTION.upper() + "!")
    assert index.is_near_duplicate("hi, there.")
    assert index.is_near_duplicate(QUESTION + " Tell me")
    assert not index.is_near_duplicate(QUESTION + " Tell me, and then explain at length how you found your answer")
    assert not index.is_near_duplicate("Hi there, how are you?")

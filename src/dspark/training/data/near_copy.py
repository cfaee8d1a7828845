"""Guards against prompts that say again what another prompt says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_WORD = re.compile(r"\w+", re.UNICODE)

#: An n-gram that this many forbidden prompts share is their common wording ("reason step by step ..."), not a copy.
BOILERPLATE_PROMPTS = 10


def words(text: str) -> list[str]:
    """Words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


class NearCopyGuard:
    """Tells whether a prompt shares a run of ``ngram_words`` words with a forbidden prompt.

    13 words is the usual contamination check; 8 words also catches short questions that were lightly reworded. A
    forbidden prompt shorter than that is looked for as a whole (one of fewer than four words must be the whole prompt).
    Runs of words that many forbidden prompts share are their common instruction and do not count.
    """

    def __init__(self, forbidden: Iterable[str], *, ngram_words: int = 8) -> None:
        if ngram_words < 1:
            raise ValueError(f"ngram_words must be at least 1, got {ngram_words}")
        found: Counter[tuple[str, ...]] = Counter()
        for text in set(forbidden):
            found.update(set(_ngrams(words(text), ngram_words)))
        own = {ngram for ngram, prompts in found.items() if prompts < BOILERPLATE_PROMPTS or len(ngram) < ngram_words}
        self._whole_prompts = {ngram for ngram in own if len(ngram) < min(4, ngram_words)}
        self._ngrams = own - self._whole_prompts
        self._lengths = sorted({len(ngram) for ngram in self._ngrams})

    def is_near_copy(self, text: str) -> bool:
        """True when ``text`` shares an n-gram with a forbidden prompt."""
        sequence = words(text)
        return tuple(sequence) in self._whole_prompts or any(
            tuple(sequence[start : start + length]) in self._ngrams
            for length in self._lengths
            for start in range(len(sequence) - length + 1)
        )


class NearDuplicateIndex:
    """Finds texts that say again what an earlier one says.

    They do when the Jaccard similarity of the two sets of word n-grams is at least ``similarity``; a text shorter than
    an n-gram counts as one.
    """

    def __init__(self, *, similarity: float, ngram_words: int = 5) -> None:
        self._similarity = similarity
        self._ngram_words = ngram_words
        self._sizes: list[int] = []
        self._texts_with: dict[int, list[int]] = {}

    def is_near_duplicate(self, text: str) -> bool:
        """True when a text added before is similar enough."""
        ngrams = self._hashes(text)
        shared: Counter[int] = Counter()
        for ngram in ngrams:
            shared.update(self._texts_with.get(ngram, ()))
        return any(
            common >= self._similarity * (len(ngrams) + self._sizes[other] - common) for other, common in shared.items()
        )

    def add(self, text: str) -> None:
        """Remember a text."""
        ngrams = self._hashes(text)
        for ngram in ngrams:
            self._texts_with.setdefault(ngram, []).append(len(self._sizes))
        self._sizes.append(len(ngrams))

    def _hashes(self, text: str) -> set[int]:
        return {hash(ngram) for ngram in _ngrams(words(text), self._ngram_words)}


def _ngrams(sequence: list[str], length: int) -> Iterable[tuple[str, ...]]:
    if not sequence:
        return
    length = min(length, len(sequence))
    for start in range(len(sequence) - length + 1):
        yield tuple(sequence[start : start + length])

"""Tokens to text as they come: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "�"
_UNFINISHED = 3
"""Bytes of a character that is not complete, at most; decoders write one or as many replacement characters for them."""
_LONGEST_WINDOW, _SHORTEST_WINDOW = 16, 6


class IncrementalText:
    """Decodes one answer token by token and watches for stop strings.

    Text is held back while its end is an unfinished character, or could still become a stop string.

    Raises:
        ValueError: if a stop string is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        if "" in stop_strings:
            raise ValueError("stop: a stop string must not be empty")
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._token_ids: list[int] = []
        self._window_start = 0  # tokens from here on are decoded again with each new one
        self._ready = 0  # characters of that text that are out of the decoder
        self._held = ""
        self._shown: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Take one token, return the text that is now safe to show; sets ``stopped`` when a stop string is complete."""
        self._token_ids.append(token_id)
        self._held += self._new_text(final=False)
        stop_at = self._find_stop(-1)
        return self._release(stop_at if self.stopped else len(self._held) - self._possible_stop_length())

    def finish(self) -> str:
        """Release what was held back (nothing, if a stop string ended the answer)."""
        if self.stopped:
            return ""
        self._held += self._new_text(final=True)
        # A stop string may stand before an unfinished character, in one token with its beginning.
        return self._release(self._find_stop(len(self._held)))

    def _find_stop(self, default: int) -> int:
        """Where the first stop string begins in the held text (which sets ``stopped``), or ``default``."""
        stop_at = min((at for stop in self._stop_strings if (at := self._held.find(stop)) >= 0), default=-1)
        self.stopped = stop_at >= 0
        return stop_at if self.stopped else default

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], "" if self.stopped else self._held[length:]
        if shown:
            self._shown.append(shown)
        return shown

    def _new_text(self, *, final: bool) -> str:
        text = self._decode(self._token_ids[self._window_start :])
        unfinished = 0 if final else min(len(text) - len(text.rstrip(_REPLACEMENT)), _UNFINISHED)
        ready = max(len(text) - unfinished, self._ready)
        new, self._ready = text[self._ready : ready], ready
        if len(self._token_ids) - self._window_start == _LONGEST_WINDOW:
            # Enough tokens stay for what a decoder does at the start of a text (dropping a space, say) not to matter.
            self._window_start = len(self._token_ids) - _SHORTEST_WINDOW
            self._ready = len(self._decode(self._token_ids[self._window_start :])) - unfinished
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _possible_stop_length(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max((len(stop) for stop in self._stop_strings), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop_strings):
                return length
        return 0

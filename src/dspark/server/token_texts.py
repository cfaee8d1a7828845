"""Single tokens as text, and their log-probabilities, as JSON can hold them: a token can be half a character."""

from __future__ import annotations

import codecs

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

_SMALLEST_LOGPROB = -9999.0  # OpenAI's number for minus infinity


def finite(logprob: float) -> float:
    """A log-probability without minus infinity, which JSON does not have."""
    return max(logprob, _SMALLEST_LOGPROB)


class TokenTexts:
    """Bytes and text of every token. Safe to use from any thread.

    Args:
        vocab_size: columns of the target's LM head; those that the tokenizer does not know have no text.

    Raises:
        ValueError: what a token stands for cannot be read off this tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        try:
            self._tokens: LLTokenizer = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"logprobs is not available: this tokenizer's tokens cannot be read ({error})") from error
        self._num_known = len(tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text, in UTF-8."""
        return self._tokens.decode_bytes([token_id]) if token_id < self._num_known else b""

    def text_of(self, token_id: int) -> str:
        """Its text; ``bytes:\\xNN...`` if it is no text by itself, so that different tokens look different."""
        token = self.bytes_of(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def is_special(self, token_id: int) -> bool:
        """Whether answers are shown without it."""
        return token_id >= self._num_known or self._tokens.is_special_token(token_id)


class TextOffsets:
    """Where tokens begin in the text that they make up, in characters.

    Attributes:
        position: where the next one does.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.position = 0

    def push(self, token: bytes) -> int:
        """Where this next token begins; with the other half of a character it begins where the character does."""
        start, (half, _) = self.position, self._decoder.getstate()
        text = self._decoder.decode(token)
        self.position += len(text)
        is_lost = half != b"" and text.startswith("\N{REPLACEMENT CHARACTER}")  # this token does not complete it
        return start + is_lost

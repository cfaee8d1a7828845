"""A tokenizer of one token a byte, so that characters have halves; its template refuses unknown roles."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 256
VOCABULARY_SIZE = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('as you wish') }}{% endif %}"
    "<{{ message.role[0] }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens 0 to 255 are the bytes of UTF-8; 256 ends an answer."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    of_byte = {_byte(character): character for character in alphabet}
    vocabulary = {of_byte[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    assert len(fast) == VOCABULARY_SIZE
    assert fast.convert_tokens_to_ids("<end>") == END
    return fast


def _byte(character: str) -> int:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes in order from U+0100 on."""
    if ord(character) < 256:
        return ord(character)
    others = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return others[ord(character) - 256]

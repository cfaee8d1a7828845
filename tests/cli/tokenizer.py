"""A tokenizer that a reader can do in their head, with the vocabulary size of the golden target."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 211
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, and words made of two letters for the rest of the vocabulary."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    words = [f"{first}{second}" for first in string.ascii_lowercase for second in "aeiou"]
    vocabulary = {token: index for index, token in enumerate((characters + words)[: VOCABULARY_SIZE - 2])}
    vocabulary["<unk>"] = VOCABULARY_SIZE - 2
    vocabulary["<mask>"] = VOCABULARY_SIZE - 1
    assert len(vocabulary) == VOCABULARY_SIZE
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", mask_token="<mask>", chat_template=CHAT_TEMPLATE
    )

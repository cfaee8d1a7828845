"""Which target wrote the rows, with which tokenizer; and whether a tokenizer is that one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dspark.training.data.rows import MANIFEST_FILE, read_manifest


class IdentifiedTokenizer(Protocol):
    """The part of a transformers tokenizer that tells which one it is."""

    chat_template: Any
    all_special_ids: Any

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, kw_only=True)
class EndpointIdentity:
    """How an endpoint was asked, and the model's name there. Where it was and with which key is no one's business."""

    api: str
    model: str
    dialect: str


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Which target wrote the rows: its name, the type of its weights, its vocabulary size, and the endpoint if any.

    An endpoint does not say which type its weights have: ``dtype`` is then ``remote``.
    """

    name: str
    dtype: str
    vocab_size: int
    endpoint: EndpointIdentity | None = None


def tokenizer_sha256(tokenizer: IdentifiedTokenizer) -> str:
    """SHA-256 of a tokenizer's vocabulary (token and id) and of which ids are special, in hexadecimal."""
    vocabulary = sorted((int(token_id), token) for token, token_id in tokenizer.get_vocab().items())
    special = sorted({int(token_id) for token_id in tokenizer.all_special_ids})
    return hashlib.sha256(json.dumps([vocabulary, special]).encode()).hexdigest()


def template_sha256(tokenizer: IdentifiedTokenizer) -> str:
    """SHA-256 of the chat template, in hexadecimal."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_data_tokenizer(directory: Path | str, tokenizer: IdentifiedTokenizer, vocab_size: int) -> str | None:
    """Check that the rows of a data directory are in the ids of ``tokenizer``.

    That each id is inside ``vocab_size`` is checked where the rows are read (``read_rows``); this reads the manifest.

    Returns:
        None when everything agrees, or what a user should be told: what could not be checked, or that the chat
        template is another one.

    Raises:
        ValueError: another tokenizer made the rows.
    """
    directory = Path(directory)
    try:
        made_by = read_manifest(directory)["recipe"].get("target", {})
    except (FileNotFoundError, NotADirectoryError):
        return (
            f"{directory} has no {MANIFEST_FILE}, so it is not known which tokenizer made its rows; all that is "
            f"checked is that their ids are inside the vocabulary of {vocab_size}"
        )
    name = made_by.get("name", "another target")
    remedy = f"give the target that made the data ({name}), or make data for this one with `dspark data`"
    same_template = made_by.get("template_sha256") == template_sha256(tokenizer)
    if "tokenizer_sha256" not in made_by:
        if not same_template:
            raise ValueError(
                f"the rows of {directory} were made with another chat template (by {name}), so most likely with "
                f"another tokenizer: {remedy}"
            )
        return (
            f"the rows of {directory} were made by a version that did not record the tokenizer; all that is checked is "
            "the chat template and that their ids are inside the vocabulary"
        )
    if made_by["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        raise ValueError(
            f"the rows of {directory} were made with another tokenizer (by {name}, vocabulary of "
            f"{made_by.get('vocab_size')}; this one has {vocab_size}), so their ids mean other tokens here: {remedy}"
        )
    if not same_template:
        return (
            f"the rows of {directory} were made with another chat template than this target's tokenizer has; the "
            "drafter learns the conversations as they are in the data"
        )
    return None

"""Training data: conversations whose every answer the target wrote itself, with exact loss spans."""

from __future__ import annotations

from dspark.training.data.conversations import read_conversations
from dspark.training.data.identity import TargetIdentity, check_data_tokenizer, tokenizer_sha256
from dspark.training.data.manifest import ForbiddenPrompts
from dspark.training.data.prompts import file_prompts, parse_sources, self_prompt_sources
from dspark.training.data.regeneration import DataProgress, DataResult, regenerate
from dspark.training.data.rows import DataRow, iterate_rows, read_manifest, read_rows
from dspark.training.data.settings import DataSettings

__all__ = [
    "DataProgress",
    "DataResult",
    "DataRow",
    "DataSettings",
    "ForbiddenPrompts",
    "TargetIdentity",
    "check_data_tokenizer",
    "file_prompts",
    "iterate_rows",
    "parse_sources",
    "read_conversations",
    "read_manifest",
    "read_rows",
    "regenerate",
    "self_prompt_sources",
    "tokenizer_sha256",
]

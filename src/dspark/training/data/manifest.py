"""``manifest.json`` of a data directory: what the rows were made from, and how many there are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dspark.files import write_json
from dspark.training.data.identity import TargetIdentity
from dspark.training.data.prompts import PromptSource
from dspark.training.data.rows import MANIFEST_FILE, SHARD_PATTERN, read_manifest
from dspark.training.data.settings import DataSettings
from dspark.training.data.store import Tally

FORMAT = "dspark-data/1"
TOKENIZER_FIELD = "target.tokenizer_sha256"


@dataclass(frozen=True, kw_only=True)
class ForbiddenPrompts:
    """Prompts that no training prompt may copy: their texts, and a name for the manifest."""

    name: str
    texts: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """What the manifest says of them."""
        digest = hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()
        return {"name": self.name, "sha256": digest, "prompts": len(self.texts)}


def describe_recipe(
    *,
    settings: DataSettings,
    sources: Sequence[PromptSource],
    forbidden: Sequence[ForbiddenPrompts],
    target: TargetIdentity,
    template_hash: str,
    tokenizer_hash: str,
) -> dict[str, Any]:
    """Everything that decides the rows, as JSON values."""
    recipe = {
        "target": {
            **dataclasses.asdict(target),
            "template_sha256": template_hash,
            "tokenizer_sha256": tokenizer_hash,
        },
        "settings": dataclasses.asdict(settings),
        "sources": {source.name: source.describe() for source in sources},
        "source_order": [source.name for source in sources],
        "forbidden": {prompts.name: prompts.describe() for prompts in forbidden},
    }
    described: dict[str, Any] = json.loads(json.dumps(recipe))
    return described


def check_same_recipe(directory: Path, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of ``directory`` when it holds rows of the same recipe, None when it holds none.

    A larger ``settings.rows`` is the same recipe: the directory is extended. So is one whose manifest is from before
    tokenizers were recorded. Raises ValueError that names the first
    field that differs, with both values.
    """
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        if any(shard.stat().st_size for shard in directory.glob(SHARD_PATTERN)):
            raise ValueError(
                f"{directory} has rows but no {MANIFEST_FILE}, so it is not known how they were made; "
                "take another directory"
            ) from None
        return None
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{directory / MANIFEST_FILE}: format is {manifest.get('format')!r}, this version writes {FORMAT!r}; "
            "take another directory"
        )
    kinds: dict[str, type | tuple[type, ...]] = {"created": str, "torn_lines": int, "seconds": (int, float)}
    for name, kind in kinds.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(
                f"{directory / MANIFEST_FILE}: {name} is {manifest.get(name)!r}, which no run writes; put it right"
            )
    before, now = _flatten(manifest["recipe"]), _flatten(recipe)
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if name == TOKENIZER_FIELD and name not in before:
            continue
        if name == "settings.rows" and isinstance(old, int) and isinstance(new, int):
            if new < old:
                raise ValueError(f"{directory} was planned for {old} rows; rows is {new}, give at least {old}")
        elif old != new:
            raise ValueError(
                f"{directory} holds rows of another run: {name} was {old!r} and now is {new!r}. "
                "Use the same settings to go on with it, or another directory"
            )
    return manifest


def write_manifest(
    directory: Path,
    *,
    recipe: Mapping[str, Any],
    tally: Tally,
    planned: int,
    created: str,
    torn_lines: int,
    seconds: float,
) -> dict[str, Any]:
    """Write the manifest atomically and return it.

    planned: rows of the plan. created: ISO time of the first run. torn_lines: lines cut off on resume, ever.
    seconds: time spent generating, all runs together.
    """
    manifest = {
        "format": FORMAT,
        "dspark_version": _version(),
        "created": created,
        "updated": utc_now(),
        "complete": tally.done == planned,
        "planned": planned,
        **tally.to_dict(),
        "torn_lines": torn_lines,
        "seconds": round(seconds, 1),
        "recipe": recipe,
    }
    write_json(directory / MANIFEST_FILE, manifest)
    return manifest


def utc_now() -> str:
    """The time as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version() -> str:
    try:
        return metadata.version("dspark")
    except metadata.PackageNotFoundError:
        return "unknown"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat

"""Where prompts come from: the target itself, steered by system prompts, a JSONL file, or a data set of the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspark.training.data.conversations import Conversation, read_conversations
from dspark.training.data.hub import PREFIX as HUB_PREFIX
from dspark.training.data.hub import HubDataset, read_hub
from dspark.training.data.steering import SteeringPrompt, built_in_steering


@dataclass(frozen=True, kw_only=True)
class SelfPrompts:
    """User turns that the target writes itself under one of ``steering``, drawn by weight. Never runs out."""

    name: str
    steering: tuple[SteeringPrompt, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.steering:
            raise ValueError(f"source {self.name} needs at least one steering prompt")
        _check_source(self.name, self.share)

    @property
    def size(self) -> int | None:
        """Number of prompts; None: as many as wanted."""
        return None

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""
        content = json.dumps([asdict(prompt) for prompt in self.steering])
        return {"name": self.name, "kind": "self", "share": self.share, "sha256": _sha256(content.encode())}

    def pick(self, fraction: float) -> SteeringPrompt:
        """The steering prompt at ``fraction`` in [0, 1) of the cumulated weights."""
        remaining = fraction * sum(prompt.weight for prompt in self.steering)
        for prompt in self.steering:
            remaining -= prompt.weight
            if remaining < 0:
                return prompt
        return self.steering[-1]


@dataclass(frozen=True, kw_only=True)
class FilePrompts:
    """Given conversations: of a JSONL file (see ``read_conversations`` for its form), or of a data set of the hub.

    sha256: of the file, or of the conversations.
    dataset: for a data set of the hub, what it is and which column the prompts are from.
    unusable: rows of it that were left out.
    """

    name: str
    conversations: tuple[Conversation, ...]
    sha256: str
    share: float = 1.0
    dataset: str | None = None
    unusable: int = 0

    def __post_init__(self) -> None:
        if not self.conversations:
            raise ValueError(f"source {self.name} has no prompts")
        _check_source(self.name, self.share)

    @property
    def size(self) -> int | None:
        """Number of prompts."""
        return len(self.conversations)

    def describe(self) -> dict[str, Any]:
        """What the manifest says of the source."""
        described = {
            "name": self.name,
            "kind": "file" if self.dataset is None else "hub",
            "share": self.share,
            "sha256": self.sha256,
            "prompts": len(self.conversations),
        }
        return described if self.dataset is None else described | {"dataset": self.dataset, "unusable": self.unusable}


PromptSource = SelfPrompts | FilePrompts


def parse_sources(specs: Sequence[str]) -> list[PromptSource]:
    """Sources from their command-line form.

    ``self`` (all domains of the built-in system prompts, in equal parts), ``self-math`` and the like (one domain),
    ``hub:owner/name[/subset][:split][:column]``, or the path of a JSONL file; each may be followed by ``=SHARE``, its
    part of the rows relative to the others (default 1). Raises ValueError or OSError that names the spec.
    """
    sources: list[PromptSource] = []
    for spec in specs:
        place, share = _split_share(spec)
        if place == "self":
            sources += self_prompt_sources(share=share)
        elif place.startswith(HUB_PREFIX):
            sources.append(hub_prompts(HubDataset.parse(place), share=share))
        elif place.startswith("self-") and not Path(place).exists():
            sources += self_prompt_sources([place.removeprefix("self-")], share=share)
        else:
            sources.append(file_prompts(Path(place), share=share))
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two sources are called {name}; rename one of the files")
    return sources


def self_prompt_sources(domains: Sequence[str] | None = None, *, share: float = 1.0) -> list[SelfPrompts]:
    """Built-in self-prompting sources, ``self-<domain>``, that have ``share`` together."""
    steering = built_in_steering()
    chosen = list(steering) if domains is None else list(domains)
    for domain in chosen:
        if domain not in steering:
            known = ", ".join(f"self-{name}" for name in steering)
            raise ValueError(f"there is no source self-{domain}; there are self, {known}")
    return [
        SelfPrompts(
            name=f"self-{domain}",
            steering=steering[domain],
            share=share / len(chosen),
        )
        for domain in chosen
    ]


def file_prompts(path: Path | str, *, name: str | None = None, share: float = 1.0) -> FilePrompts:
    """The prompts of a JSONL file as a source, called after the file unless ``name`` is given."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}; give a JSONL file, or `self` to self-prompt")
    return FilePrompts(
        name=path.name.removesuffix(".jsonl") if name is None else name,
        conversations=tuple(read_conversations(path)),
        sha256=_sha256(path.read_bytes()),
        share=share,
    )


def hub_prompts(dataset: HubDataset, *, share: float = 1.0) -> FilePrompts:
    """The prompts of a data set of the hub as a source, called ``owner--name``."""
    read = read_hub(dataset)
    content = json.dumps([[conversation.system, conversation.user_turns] for conversation in read.conversations])
    return FilePrompts(
        name=dataset.name.replace("/", "--"),
        conversations=read.conversations,
        sha256=_sha256(content.encode()),
        share=share,
        dataset=str(replace(dataset, column=read.column)),
        unusable=read.unusable,
    )


def _split_share(spec: str) -> tuple[str, float]:
    place, separator, share = spec.rpartition("=")
    if not separator or Path(spec).exists():
        return spec, 1.0
    try:
        return place, float(share)
    except ValueError:
        return spec, 1.0


def _check_source(name: str, share: float) -> None:
    if not name or "/" in name:
        raise ValueError(f"the name of a source must be non-empty and without '/', got {name!r}")
    if not share > 0:
        raise ValueError(f"the share of source {name} must be positive, got {share}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

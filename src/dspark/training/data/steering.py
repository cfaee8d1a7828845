"""How a target is steered to write user turns about something: system prompts, first words, last words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

BUILT_IN_FILE = "system_prompts.yaml"


@dataclass(frozen=True, kw_only=True)
class SteeringPrompt:
    """A system prompt under which the target writes a user turn.

    weight: how often it is used, relative to the others of its source.
    openers: texts with which the user turn may begin; the target goes on from there.
    closers: texts of which one is put behind the finished turn.
    """

    system: str
    weight: float = 1.0
    openers: tuple[str, ...] = ("",)
    closers: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if not self.system.strip():
            raise ValueError("system is empty: a steering prompt needs a system prompt")
        if not self.weight > 0:
            raise ValueError(f"weight must be positive, got {self.weight} for the system prompt {self.system!r}")
        if not self.openers or any(opener != opener.strip() for opener in self.openers):
            raise ValueError(f"openers must be one or more texts without space around them, for {self.system!r}")
        if not self.closers:
            raise ValueError(f"closers must be one or more texts, for {self.system!r}")


@cache
def built_in_steering() -> dict[str, tuple[SteeringPrompt, ...]]:
    """The built-in steering prompts by domain."""
    domains = yaml.safe_load(files(__package__).joinpath(BUILT_IN_FILE).read_text(encoding="utf-8"))
    return {
        domain: tuple(
            SteeringPrompt(
                system=prompt["system"],
                weight=float(prompt.get("weight", 1)),
                openers=tuple(prompt["openers"]),
                closers=tuple(prompt.get("closers", [""])),
            )
            for prompt in prompts
        )
        for domain, prompts in domains.items()
    }

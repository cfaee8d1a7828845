"""What an engine is made of, by name: target, drafter, and what steps cost with them here."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.registry import TrainableDrafter
from dspark.engine.profile import StoredProfile, profile_key, read_profile, write_profile
from dspark.engine.profile_measurement import measured_profile
from dspark.engine.settings import EngineSettings
from dspark.models.loading import LoadedTarget, load_target
from dspark.scheduling import Off, Policy, StepCost

__all__ = ["Parts", "known_or_measured", "load_parts"]

_EMBEDDED = "embedded"
_log = logging.getLogger("dspark")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A target, its drafter (None with policy ``off``), and the cost of steps (None where the policy does not ask)."""

    target: LoadedTarget
    drafter: TrainableDrafter | None
    cost: StepCost | None


def load_parts(
    target: str,
    drafter: str | None,
    *,
    policy: Policy,
    dtype: str,
    device: str,
    cost: StepCost | None,
    settings: EngineSettings,
) -> Parts:
    """See `dspark.engine.engine.Engine.load`."""
    needs_drafter = not isinstance(policy, Off)
    if needs_drafter and drafter is None and target != _EMBEDDED:
        raise ValueError(f"target {target} needs a drafter that was trained for it: give drafter, or policy off")
    loaded = load_target(target, dtype=dtype, device=device)
    for notice in loaded.notices:
        _log.log(logging.INFO if loaded.model.compute_dtype == "int8" else logging.WARNING, notice)
    if not needs_drafter:
        return Parts(target=loaded, drafter=None, cost=cost)
    opened = load_drafter(drafter or _EMBEDDED, loaded.model, device=loaded.model.device)
    if policy.needs_cost and cost is None:
        cost = known_or_measured(loaded, opened, settings).cost
    return Parts(target=loaded, drafter=opened, cost=cost)


def known_or_measured(target: LoadedTarget, drafter: TrainableDrafter, settings: EngineSettings) -> StoredProfile:
    """The stored profile of these models here, or one that is measured now and stored.

    Raises:
        ValueError: the stored one is damaged, or does not cover ``max_concurrency``.
    """
    key = profile_key(target, drafter, max_concurrency=settings.max_concurrency)
    stored = read_profile(key)
    if stored is not None:
        return stored
    _log.warning("measuring what steps cost on this machine (`dspark profile`), for a minute or more; kept for later")
    profile = measured_profile(key, target.model, drafter)
    _log.warning("measured; stored in %s", write_profile(profile))
    return profile

"""A measured cost of steps, kept in the user's cache for the hardware and the models that it was measured on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from dspark import __version__
from dspark.drafters.registry import TrainableDrafter, drafter_kind
from dspark.files import write_json
from dspark.models.embedded import cache_root
from dspark.models.hardware import hardware_name
from dspark.models.instructions import INSTRUCTIONS
from dspark.models.loading import LoadedTarget
from dspark.scheduling import DraftPoint, PrefillPoint, StepCost, VerifyPoint

__all__ = [
    "ProfileKey",
    "ProfilePoints",
    "StoredProfile",
    "profile_key",
    "profile_path",
    "read_profile",
    "write_profile",
]

_FORMAT = 1
_REMEDY = "measure again with `dspark profile`"
_NOT_IN_NAME = frozenset({"target", "torch", "dspark", "max_concurrency"})
"""Fields of the key that do not lead to a file of their own: a newer measurement takes an older one's place."""


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """All that the seconds of a step depend on.

    Attributes:
        hardware: model name of the processor or GPU.
        cores: processor cores that this process may use.
        threads: threads of one operation.
        target: its name, for people; what tells targets apart is ``fingerprint``.
        fingerprint: of the target's checkpoint.
        implementation: ``native`` or ``transformers``.
        dtype: what the target computes in.
        instructions: what int8 products are compiled for, or ``none``.
        drafter: kind, number format and digest of the configuration: what a draft costs follows from these, so a
            drafter that was trained further keeps its profile.
        block_size: draft tokens of a round at most.
        torch: version.
        dspark: version.
        max_concurrency: requests at once that were measured, or are asked for. A profile serves fewer, not more.
    """

    hardware: str
    cores: int
    threads: int
    target: str = field(compare=False)
    fingerprint: str
    implementation: str
    dtype: str
    instructions: str
    drafter: str
    block_size: int
    torch: str
    dspark: str
    max_concurrency: int


@dataclass(frozen=True, kw_only=True)
class ProfilePoints:
    """Medians that a cost was fitted to."""

    verify: tuple[VerifyPoint, ...]
    draft: tuple[DraftPoint, ...]
    prefill: tuple[PrefillPoint, ...]


@dataclass(frozen=True, kw_only=True)
class StoredProfile:
    """What one measurement found.

    Attributes:
        key: what it is valid for.
        cost: fitted to ``points``, not corrected.
        points: as measured.
        measured_at: date and time, ISO 8601.
        seconds_taken: by the measurement.
    """

    key: ProfileKey
    cost: StepCost
    points: ProfilePoints
    measured_at: str
    seconds_taken: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "format": _FORMAT,
            "key": asdict(self.key),
            "measured_at": self.measured_at,
            "seconds_taken": self.seconds_taken,
            "cost": self.cost.as_dict(),
            "points": asdict(self.points),
        }


def profile_key(target: LoadedTarget, drafter: TrainableDrafter, *, max_concurrency: int) -> ProfileKey:
    """The key of this process, on this machine, with these models."""
    dtype = str(drafter.dtype).removeprefix("torch.")
    config = json.dumps(drafter.config.to_dict(dtype), sort_keys=True)
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    return ProfileKey(
        hardware=hardware_name(target.model.device),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        target=Path(target.name).name,
        fingerprint=target.model.fingerprint,
        implementation=target.implementation,
        dtype=target.model.compute_dtype,
        instructions="none" if INSTRUCTIONS is None else INSTRUCTIONS.name,
        drafter=f"{drafter_kind(drafter.config)}, {drafter.compute_dtype}, {digest}",
        block_size=drafter.block_size,
        torch=torch.__version__,
        dspark=__version__,
        max_concurrency=max_concurrency,
    )


def profile_path(key: ProfileKey) -> Path:
    """Where the profile of this hardware and these models is kept (``$DSPARK_CACHE`` or the user's cache)."""
    named = {name: value for name, value in asdict(key).items() if name not in _NOT_IN_NAME}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9.]+", "-", f"{key.target}-{key.dtype}".lower()).strip("-.")
    return cache_root() / "profiles" / f"{name}-{digest}.json"


def read_profile(key: ProfileKey, path: Path | None = None) -> StoredProfile | None:
    """The profile that was measured for ``key``; None if none was.

    Args:
        key: what it is to be used for.
        path: a file to read in place of the one in the cache; it has to be there.

    Raises:
        ValueError: the file is damaged or was measured on something else, naming it, the field and the remedy.
        OSError: it cannot be read.
    """
    file = profile_path(key) if path is None else path
    if path is None and not file.exists():
        return None
    try:
        profile = _from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file} is no profile that can be read ({error}): {_REMEDY}") from None
    _check(file, profile.key, key)
    return profile


def write_profile(profile: StoredProfile) -> Path:
    """Put a profile into the cache, in one step, where ``read_profile`` finds it; returns the file.

    Raises:
        OSError: it could not be written; an older one is unchanged.
    """
    path = profile_path(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile.to_dict())
    return path


def _check(file: Path, measured: ProfileKey, asked: ProfileKey) -> None:
    if measured.max_concurrency < asked.max_concurrency:
        raise ValueError(
            f"{file} was measured with up to {measured.max_concurrency} requests at once, and max_concurrency is"
            f" {asked.max_concurrency}: measure again with `dspark profile --max-concurrency {asked.max_concurrency}`"
        )
    for each in fields(ProfileKey):
        then, now = getattr(measured, each.name), getattr(asked, each.name)
        if each.compare and each.name != "max_concurrency" and then != now:
            raise ValueError(f"{file} was measured with {each.name} {then!r}, and here it is {now!r}: {_REMEDY}")


def _from_dict(values: Any) -> StoredProfile:
    """What ``StoredProfile.to_dict`` gave. Raises ValueError saying what is wrong."""
    if not isinstance(values, Mapping) or values.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    try:
        points = values["points"]
        return StoredProfile(
            key=ProfileKey(**values["key"]),
            cost=StepCost.from_dict(values["cost"]),
            points=ProfilePoints(
                verify=tuple(VerifyPoint(**point) for point in points["verify"]),
                draft=tuple(DraftPoint(**point) for point in points["draft"]),
                prefill=tuple(PrefillPoint(**point) for point in points["prefill"]),
            ),
            measured_at=values["measured_at"],
            seconds_taken=float(values["seconds_taken"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of the wrong kind: {error}") from None


def _usable_cores() -> int:
    """Cores that the scheduler of the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

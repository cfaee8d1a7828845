"""``dspark profile``: measure what a step costs here, for the scheduler to go by."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from dspark.cli.options import (
    EMBEDDED,
    NO_DRAFTER,
    OUTPUT,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    TargetOption,
)

if TYPE_CHECKING:
    from dspark.cli.models import Models
    from dspark.engine.profile import ProfileKey, StoredProfile

RUN = Group("Run", sort_key=4)


def profile(
    *,
    target: TargetOption = EMBEDDED,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    max_concurrency: Annotated[
        int, Parameter(group=RUN, help="Measure up to this many requests at once; a profile serves fewer, not more.")
    ] = 32,
    remeasure: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, group=RUN, help="Measure even if there is a profile for these models here."
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        Parameter(group=OUTPUT, show_default=False, help="Draw what was measured, as an HTML page."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure what a step costs on this hardware, so that the scheduler knows what is worth verifying.

    Times target steps by their tokens, drafts by requests and length, and prompts, on made-up requests, and keeps the
    result for this hardware, number of threads, target, drafter and number format. It takes one to three minutes on a
    CPU; let nothing else run meanwhile. Examples:

    - `dspark profile`
    - `dspark profile --target TARGET --drafter DRAFTER --max-concurrency 64 --plot profile.html`
    """
    from dspark.cli.models import open_models
    from dspark.engine.profile import profile_key, profile_path
    from dspark.files import write_text

    if max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {max_concurrency}")
    if drafter == NO_DRAFTER:
        raise ValueError("--drafter none leaves nothing to schedule: give the drafter that will be used")
    models = open_models(target=target, drafter=drafter, speculation=True, dtype=dtype, device=device)
    assert models.drafter is not None
    key = profile_key(models.target, models.drafter, max_concurrency=max_concurrency)
    found = None if remeasure else usable_profile(key)
    measured = found or measure_profile(models, key, quiet=json)
    if plot is not None:
        write_text(plot, _page(measured))
    path = profile_path(key)
    if json:
        print(jsonlib.dumps({"file": str(path), "measured_now": found is None} | measured.to_dict()))
        return
    from dspark.cli.profile_display import show_profile

    if found is not None:
        print("There is a profile for these models here (--remeasure makes a new one):")
    show_profile(measured, path)
    if plot is not None:
        print(f"plot: {plot}")


def usable_profile(key: ProfileKey) -> StoredProfile | None:
    """The profile that is there already, unless it cannot be used; why not is said on stderr."""
    from dspark.cli.calibration_rounds import note
    from dspark.engine.profile import read_profile

    try:
        return read_profile(key)
    except ValueError as error:
        note(f"note: {error}; doing that now")
        return None


def measure_profile(models: Models, key: ProfileKey, *, quiet: bool) -> StoredProfile:
    """Measure a profile and keep it; stderr tells how far it is unless ``quiet``."""
    from dspark.cli.calibration_rounds import note
    from dspark.engine.profile import write_profile
    from dspark.engine.profile_measurement import measured_profile

    assert models.drafter is not None
    progress = (lambda message: None) if quiet else note
    measured = measured_profile(key, models.target.model, models.drafter, progress=progress)
    write_profile(measured)
    return measured


def _page(measured: StoredProfile) -> str:
    from dspark.cli.profile_display import facts_line
    from dspark.evaluation.profile_page import profile_page

    points = measured.points
    title = f"What a step costs: {measured.key.target}"
    return profile_page(measured.cost, points.verify, points.draft, title=title, facts=facts_line(measured))

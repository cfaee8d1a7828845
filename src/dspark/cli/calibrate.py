"""``dspark calibrate``: make a drafter's confidences probabilities."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from dspark.cli.options import (
    EMBEDDED,
    LENGTH,
    OUTPUT,
    PROMPT,
    SAMPLING,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    ForbidOption,
    JsonOption,
    TargetOption,
)

if TYPE_CHECKING:
    from dspark.calibration.regimes import CalibrationStudy
    from dspark.cli.models import Models
    from dspark.drafters.calibration_file import CalibrationFile
    from dspark.drafters.registry import TrainableDrafter

RUN = Group("Run", sort_key=4)
ROUNDS_FILE = "calibration-rounds.jsonl"


def calibrate(
    *,
    target: TargetOption = "embedded",
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    prompts: Annotated[
        tuple[Path, ...],
        Parameter(
            negative=(),
            show_default=False,
            group=PROMPT,
            help='JSONL file of prompts that the drafter was not trained on, `{"turns": ["...", ...]}` a line; may be'
            " given several times. Without it, a small set that comes with the package. Never a benchmark.",
        ),
    ] = (),
    forbid: ForbidOption = (),
    temperatures: Annotated[
        str, Parameter(group=SAMPLING, help="Sampling temperatures to collect rounds at, `0,0.7,1`.")
    ] = "0,0.7,1",
    seed: Annotated[int, Parameter(group=SAMPLING, help="Of the prompts' order and halves, and of sampling.")] = 0,
    max_tokens: Annotated[int, Parameter(group=LENGTH, help="End an answer after this many tokens.")] = 256,
    rounds: Annotated[
        int,
        Parameter(group=RUN, help="Rounds to collect at each sampling temperature; half of them check the fit."),
    ] = 8000,
    concurrency: Annotated[
        int, Parameter(group=RUN, help="Answers made at once. More is faster, and takes more memory.")
    ] = 16,
    rounds_file: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            show_default=False,
            help="Where rounds are kept, and taken up again, with the reliability diagrams as a page (.html) beside"
            f" them; `{ROUNDS_FILE}` beside the result by default.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT, show_default=False, help="Directory for `calibration.json`; by default the drafter's own."
        ),
    ] = None,
    move_bias: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            group=RUN,
            help="First move the confidence head's bias, for confidences that are too high or too low throughout, which"
            " temperatures cannot mend. The drafter with it is written to --out, another directory than its own.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a drafter's confidences probabilities, and show how true they were and are.

    Answers prompts with every draft verified to its end, fits one temperature for each draft position (sequential
    temperature scaling), and writes `calibration.json` beside the drafter: from then on every command that loads the
    drafter uses it. Half of the prompts are only for checking: the tables and the reliability diagrams are about
    those. Examples:

    - `dspark calibrate --target TARGET --drafter DRAFTER --prompts held-out.jsonl`
    - `dspark calibrate --out calibrated` for the drafter that comes with the package

    Ctrl-C or a crash loses nothing but the answers that were being made: the same command goes on.
    """
    from dspark.calibration.judged_rounds import joined
    from dspark.calibration.offset import fit_offset
    from dspark.calibration.regimes import study_calibration
    from dspark.cli.calibration_rounds import calibration_prompts, collect, note
    from dspark.cli.models import open_models
    from dspark.drafters.calibration_file import CALIBRATION_FILE, write_calibration
    from dspark.evaluation.calibration_page import calibration_page
    from dspark.evaluation.collect import halves
    from dspark.evaluation.rounds import judged_rounds
    from dspark.files import write_text

    sampling_temperatures = _sampling_temperatures(temperatures)
    if rounds < 1 or max_tokens < 2:
        raise ValueError("--rounds must be at least 1 and --max-tokens at least 2")
    if concurrency < 1:
        raise ValueError(f"--concurrency is {concurrency}; it must be at least 1")
    chosen = calibration_prompts(prompts, forbid)
    name = EMBEDDED if drafter is None else drafter
    if out is None and name == EMBEDDED:
        raise ValueError("the drafter that comes with the package is not written to: give --out DIRECTORY")
    if move_bias and (out is None or out.resolve() == Path(name).resolve()):
        raise ValueError("--move-bias changes the drafter: give --out DIRECTORY, another than the drafter's own")
    directory = Path(name) if out is None else out
    rounds_path = directory / ROUNDS_FILE if rounds_file is None else rounds_file
    page = rounds_path.with_suffix(".html")
    if page == rounds_path:
        raise ValueError(f"--rounds-file {rounds_path}: the page with the diagrams goes there; name it .jsonl")

    models = open_models(target=target, drafter=drafter, speculation=True, dtype=dtype, device=device, calibrated=False)
    if models.drafter is None or not models.drafter.has_confidence_head:
        raise ValueError(f"--drafter {name} has no confidence head, so there is nothing to calibrate")
    directory.mkdir(parents=True, exist_ok=True)
    settings = _settings(models, max_tokens=max_tokens, seed=seed)
    collection = collect(
        models,
        chosen,
        path=rounds_path,
        sampling_temperatures=sampling_temperatures,
        rounds=rounds,
        seed=seed,
        concurrency=concurrency,
        settings=settings,
        quiet=json,
    )

    if not json:
        note("fitting and checking")
    fit, check = (
        {
            sampling_temperature: judged_rounds(
                [
                    record
                    for record in collection.records
                    if record.prompt_id in half and record.sampling_temperature == sampling_temperature
                ],
                models.drafter.block_size,
            )
            for sampling_temperature in sampling_temperatures
        }
        for half in halves([record.prompt_id for record in collection.records], seed)
    )
    offset = fit_offset(joined(list(fit.values()))) if move_bias else 0.0
    study = study_calibration(fit, check, seed=seed, offset=offset)
    options = {"rounds": rounds, "seed": seed, "bias_moved_by": offset}
    if move_bias:
        settings |= {"drafter": _move_bias(models.drafter, offset, directory)}
    file = _file(study, settings, dataset=_dataset(prompts, len(chosen)), options=options)
    write_text(page, calibration_page(study, f"Calibration of {Path(name).name}"))
    write_calibration(directory / CALIBRATION_FILE, file)
    if json:
        print(jsonlib.dumps({"file": str(directory / CALIBRATION_FILE)} | file.to_dict()))
        return
    from dspark.cli.calibration_display import show_study

    show_study(study, directory / CALIBRATION_FILE, page)


def _move_bias(drafter: TrainableDrafter, offset: float, directory: Path) -> str:
    """Write the drafter with its confidence head's bias moved; returns its fingerprint."""
    import torch

    from dspark.drafters.calibration_file import drafter_fingerprint
    from dspark.drafters.checkpoint import save_drafter

    with torch.no_grad():
        drafter.get_parameter("confidence_head.proj.bias").add_(offset)
    save_drafter(drafter, directory, include_embeddings=False)
    return drafter_fingerprint(drafter)


def _sampling_temperatures(text: str) -> tuple[float, ...]:
    from dspark.decoding.settings import SamplingSettings

    try:
        chosen = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--temperatures must be numbers separated by commas, like 0,0.7,1; got {text!r}") from None
    for one in chosen:
        SamplingSettings(temperature=one)
    return tuple(chosen)


def _settings(models: Models, *, max_tokens: int, seed: int) -> dict[str, Any]:
    """What the rounds depend on."""
    from dspark.drafters.calibration_file import drafter_fingerprint

    assert models.drafter is not None
    return {
        "target": {
            "name": models.target.public_name,
            "fingerprint": models.target.model.fingerprint,
            "dtype": models.target.model.compute_dtype,
        },
        "drafter": drafter_fingerprint(models.drafter),
        "max_tokens": max_tokens,
        "seed": seed,
    }


def _file(
    study: CalibrationStudy, settings: Mapping[str, Any], *, dataset: str, options: Mapping[str, Any]
) -> CalibrationFile:
    from dspark.drafters.calibration_file import CalibrationFile
    from dspark.training.provenance import provenance

    made = provenance()
    positions = range(len(study.shared))

    def mean_over_regimes(which: str) -> tuple[float, ...]:
        of_regimes = [getattr(regime, which).ece for regime in study.regimes]
        return tuple(sum(ece[k].value for ece in of_regimes) / len(of_regimes) for k in positions)

    return CalibrationFile(
        calibration=study.calibration,
        dataset=dataset,
        num_samples=sum(regime.fit_rounds for regime in study.regimes),
        ece_before=mean_over_regimes("before"),
        ece_after=mean_over_regimes("after"),
        drafter=settings["drafter"],
        target=settings["target"],
        date=datetime.now(UTC).date().isoformat(),
        details={
            "options": {"max_tokens": settings["max_tokens"], **options},
            "regimes": [regime.to_json() for regime in study.regimes],
            **{name: made[name] for name in ("commit", "versions", "machine")},
        },
    )


def _dataset(paths: Sequence[Path], count: int) -> str:
    names = ", ".join(path.name for path in paths) if paths else "the calibration prompts of dspark"
    return f"{names} ({count} prompts)"

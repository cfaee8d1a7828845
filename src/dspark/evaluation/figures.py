"""The figures of a report, from its numbers alone: those of the paper's section 4 that the evaluation has data for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.evaluation.charts import Chart, Point, Series

__all__ = ["Figure", "report_figures"]

Numbers = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels that share their series; ``name`` is unique in a report."""

    name: str
    title: str
    caption: str
    charts: tuple[Chart, ...]


def report_figures(report: Numbers) -> list[Figure]:
    """Acceptance by position, and depth, proposal length, thresholds and reliability where they were measured."""
    base = [arm for arm in report["arms"] if arm["draft_tokens"] is None and arm["threshold"] is None]
    facts = {drafter["label"]: drafter for drafter in report["drafters"]}
    figures = [_by_position(base)] if report["completed"] else []
    return [
        *figures,
        *_depth(base, facts),
        *_proposal_length(report, base, facts),
        *_thresholds(report, base),
        *_reliability(report["reliability"]),
    ]


def _by_position(base: Sequence[Numbers]) -> Figure:
    charts = []
    for name, of in _groups(base[0]):
        for key, label in (("conditional_acceptance", "acceptance"), ("prefix_survival", "survival")):
            series = tuple(
                Series(
                    label=arm["label"],
                    points=tuple(_points((row["position"], row[key]) for row in of(arm)["positions"])),
                )
                for arm in base
            )
            title = f"{name}: {label}"
            charts.append(
                Chart(title=title, x_label="draft position", y_label=label, series=series, percent=True, from_zero=True)
            )
    return Figure(
        name="acceptance-by-position",
        title="Acceptance by position (the paper's Fig. 2)",
        caption="Acceptance: of the rounds in which everything before position k was accepted. Survival: of the rounds "
        "that verified position k, those in which everything up to it was accepted.",
        charts=tuple(charts),
    )


def _depth(base: Sequence[Numbers], facts: Mapping[str, Numbers]) -> Iterator[Figure]:
    kinds: dict[str, list[Numbers]] = {}
    for arm in base:
        kinds.setdefault(facts[arm["drafter"]]["kind"], []).append(arm)
    depths = {kind: {facts[arm["drafter"]]["num_layers"] for arm in arms} for kind, arms in kinds.items()}
    if all(len(found) < 2 for found in depths.values()):
        return

    def layers(arm: Numbers) -> float:
        return float(facts[arm["drafter"]]["num_layers"])

    charts = [
        Chart(
            title=name,
            x_label="draft layers",
            y_label="accepted length",
            series=tuple(
                Series(
                    label=kind,
                    points=tuple(
                        _points((layers(arm), of(arm)["accepted_length"]) for arm in sorted(arms, key=layers))
                    ),
                )
                for kind, arms in kinds.items()
            ),
        )
        for name, of in _groups(base[0])
    ]
    yield Figure(
        name="depth",
        title="Depth (the paper's Fig. 3)",
        caption="Accepted length of drafters with a different number of draft layers.",
        charts=tuple(charts),
    )


def _proposal_length(report: Numbers, base: Sequence[Numbers], facts: Mapping[str, Numbers]) -> Iterator[Figure]:
    swept = {arm["drafter"] for arm in report["arms"] if arm["draft_tokens"] is not None}
    if not swept:
        return

    labels = [arm["label"] for arm in base if arm["label"] in swept]

    def curves(value: Callable[[Numbers], Any]) -> tuple[Series, ...]:
        return tuple(
            Series(
                label=label,
                points=tuple(
                    _points(
                        sorted(
                            (
                                (arm["draft_tokens"] or facts[label]["block_size"], value(arm))
                                for arm in report["arms"]
                                if arm["drafter"] == label and arm["threshold"] is None
                            ),
                            key=lambda point: point[0],
                        )
                    )
                ),
            )
            for label in labels
        )

    charts = []
    for name, of in _groups(base[0]):
        series = curves(lambda arm, of=of: of(arm)["accepted_length"])  # type: ignore[misc]
        charts.append(Chart(title=name, x_label="draft tokens", y_label="accepted length", series=series))
    for key, title in (("draft", "drafting a round"), ("verify", "verifying a round")):
        series = curves(lambda arm, key=key: arm["overall"]["milliseconds_per_round"][key])  # type: ignore[misc]
        charts.append(Chart(title=title, x_label="draft tokens", y_label="milliseconds", series=series, from_zero=True))
    if report["target_alone"] is not None:
        series = curves(lambda arm: arm["overall"]["speed_up"])
        charts.append(Chart(title="speed-up, all prompts", x_label="draft tokens", y_label="speed-up", series=series))
    yield Figure(
        name="proposal-length",
        title="Proposal length (the paper's Fig. 4)",
        caption="What a longer draft gains and costs. What the sequential head costs is the distance between the "
        "drafting times of two drafters that differ in it alone.",
        charts=tuple(charts),
    )


def _thresholds(report: Numbers, base: Sequence[Numbers]) -> Iterator[Figure]:
    for drafter in base:
        arms = [arm for arm in report["arms"] if arm["drafter"] == drafter["drafter"] and arm["threshold"] is not None]
        if not arms:
            continue
        wanted = [
            ("verified_token_acceptance", "verified tokens accepted", True),
            ("accepted_length", "accepted length", False),
        ]
        if report["target_alone"] is not None:
            wanted.append(("speed_up", "speed-up", False))
        charts = []
        for key, label, percent in wanted:
            series = tuple(
                Series(
                    label=name,
                    points=tuple(
                        _points(
                            (arm["threshold"] or 0.0, of(arm)[key])
                            for arm in sorted([drafter, *arms], key=lambda arm: arm["threshold"] or 0.0)
                        )
                    ),
                )
                for name, of in _groups(drafter)
            )
            charts.append(
                Chart(title=label, x_label="confidence threshold", y_label=label, series=series, percent=percent)
            )
        yield Figure(
            name=f"threshold {drafter['label']}",
            title=f"Confidence threshold, {drafter['label']} (the paper's Fig. 5)",
            caption="A draft is verified up to its first token whose confidence is below the threshold.",
            charts=tuple(charts),
        )


def _reliability(drafters: Mapping[str, Numbers | None]) -> Iterator[Figure]:
    for label, variants in drafters.items():
        if variants is None:
            continue
        charts = [
            Chart(
                title=f"{variant}: mean ECE {numbers['mean_calibration_error']:.2%}",
                x_label="estimated survival",
                y_label="accepted",
                unit_square=True,
                series=tuple(
                    Series(
                        label=f"prefix {row['position']}",
                        points=tuple(Point(x=entry["confidence"], y=entry["accepted"]) for entry in row["bins"]),
                    )
                    for row in numbers["positions"]
                ),
            )
            for variant, numbers in variants.items()
            if numbers is not None
        ]
        yield Figure(
            name=f"reliability {label}",
            title=f"Reliability, {label} (the paper's Fig. 6)",
            caption="Prefixes by what the confidence head said of their survival, in 20 equal bins, against the share "
            "that was accepted. On the dashed line confidences are probabilities.",
            charts=tuple(charts),
        )


def _groups(arm: Numbers) -> list[tuple[str, Callable[[Numbers], Numbers]]]:
    """Domains, and all prompts where there is more than one: their name, and how to find their numbers in any arm."""
    found: list[tuple[str, Callable[[Numbers], Numbers]]] = [
        (name, lambda arm, name=name: arm["domains"][name])  # type: ignore[misc]
        for name in arm["domains"]
    ]
    if len(found) != 1:
        found.append(("all", lambda arm: arm["overall"]))
    return found


def _points(values: Iterator[tuple[float, Any]] | Sequence[tuple[float, Any]]) -> Iterator[Point]:
    """Points of estimates (with their interval) or plain numbers; what could not be measured is left out."""
    for x, y in values:
        if isinstance(y, Mapping):
            interval = y["interval"]
            yield Point(x=x, y=y["value"], interval=None if interval is None else (interval[0], interval[1]))
        elif y is not None:
            yield Point(x=x, y=y)

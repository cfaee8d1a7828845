"""The tables of a report: rows of text, shown by the terminal and by the HTML page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.evaluation.summary import PHASES

__all__ = ["Table", "report_tables"]

Numbers = Mapping[str, Any]
_NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def report_tables(report: Numbers) -> list[Table]:
    """All tables that the report has numbers for, the most important first."""
    base = [arm for arm in report["arms"] if arm["draft_tokens"] is None and arm["threshold"] is None]
    sweeps = [arm for arm in report["arms"] if arm not in base]
    tables = [_results(report, base), _positions(base), _counts(report, base)]
    if report["comparisons"]:
        tables.append(_comparisons(report))
    if sweeps:
        tables.append(_sweeps(report, base, sweeps))
    if reliability := {name: found for name, found in report["reliability"].items() if found is not None}:
        tables.append(_reliability(reliability))
    return tables


def _results(report: Numbers, arms: Sequence[Numbers]) -> Table:
    rows, alone = [], report["target_alone"]
    speed = _speed_key(report)
    for arm in arms:
        # The same prompts, so the same lines.
        alone_lines = [None for _ in _lines(arm)] if alone is None else [numbers for *_, numbers in _lines(alone)]
        for (_, name, numbers), alone_numbers in zip(_lines(arm), alone_lines, strict=True):
            rows.append(
                (
                    arm["label"],
                    name,
                    str(numbers["prompts"]),
                    _estimate(numbers["accepted_length"], ".2f"),
                    _value(numbers["verified_token_acceptance"], ".1%"),
                    _value(numbers[speed], ".1f"),
                    _NOTHING if alone_numbers is None else _value(alone_numbers[speed], ".1f"),
                    _estimate(numbers["speed_up"], ".2f", "x"),
                    _NOTHING if numbers["identical"] is None else f"{numbers['identical']} of {numbers['answers']}",
                )
            )
        means = arm["mean_of_domains"]
        if len(arm["domains"]) > 1:
            length, speed_up = (
                _NOTHING if means[key] is None else f"{means[key]:.2f}{unit}"
                for key, unit in (("accepted_length", ""), ("speed_up", "x"))
            )
            rows.append((arm["label"], "mean of domains", "", length, "", "", "", speed_up, ""))
    return Table(
        title="Accepted length and speed",
        columns=(
            "drafter",
            "prompts from",
            "prompts",
            "accepted length",
            "verified accepted",
            "tok/s",
            "alone",
            "speed-up",
            "identical",
        ),
        rows=tuple(rows),
        note=f"Pooled over all rounds of all prompts; in brackets {report['intervals']['level']:.0%} intervals over "
        f"prompts. Verified accepted: of the draft tokens that the target verified. {_speed_note(report)}",
    )


def _positions(arms: Sequence[Numbers]) -> Table:
    width = max((len(arm["overall"]["positions"]) for arm in arms), default=0)
    rows = []
    for arm in arms:
        for _, name, numbers in _lines(arm):
            for key, what in (("conditional_acceptance", "acceptance"), ("prefix_survival", "survival")):
                cells = [_value(row[key], ".2f") for row in numbers["positions"]]
                rows.append((arm["label"], name, what, *cells, *[_NOTHING] * (width - len(cells))))
    return Table(
        title="By draft position",
        columns=("drafter", "prompts from", "", *(str(position) for position in range(1, width + 1))),
        rows=tuple(rows),
        note="Acceptance: of the rounds in which everything before was accepted. Survival: of the rounds that verified "
        "the position, those in which everything up to it was accepted.",
    )


def _counts(report: Numbers, arms: Sequence[Numbers]) -> Table:
    rows = []
    for arm in arms:
        for _, name, numbers in _lines(arm):
            split = numbers["milliseconds_per_round"]
            rows.append(
                (
                    arm["label"],
                    name,
                    *(str(numbers[key]) for key in ("rounds", "drafted", "verified", "accepted", "committed")),
                    *(_NOTHING if split[phase] is None else f"{split[phase]:.2f}" for phase in PHASES),
                )
            )
    return Table(
        title="Rounds",
        columns=(
            "drafter",
            "prompts from",
            "rounds",
            "drafted",
            "verified",
            "accepted",
            "committed",
            *(f"{phase} ms" for phase in PHASES),
        ),
        rows=tuple(rows),
        note="Milliseconds are means of a round"
        + (", its share of a step that many answers have" if report["speed"]["of"] == "throughput" else "")
        + "; tokens are those of all rounds.",
    )


def _comparisons(report: Numbers) -> Table:
    rows = [
        (
            f"{pair['other']} against {pair['reference']}",
            name,
            str(numbers["prompts"]),
            _estimate(numbers["accepted_length_difference"], "+.3f"),
            _estimate(numbers["speed_ratio"], ".3f", "x"),
        )
        for pair in report["comparisons"]
        for _, name, numbers in _lines(pair)
    ]
    return Table(
        title="Drafters compared",
        columns=("drafters", "prompts from", "prompts", "accepted length", "speed"),
        rows=tuple(rows),
        note="Paired: both answered the same prompts, and every draw of the interval takes the same prompts for both.",
    )


def _sweeps(report: Numbers, base: Sequence[Numbers], sweeps: Sequence[Numbers]) -> Table:
    rows = []
    for arm in base:
        for point in [arm, *(point for point in sweeps if point["drafter"] == arm["drafter"])]:
            for level, name, numbers in _lines(point):
                if level != "benchmarks":
                    rows.append(
                        (
                            point["label"],
                            name,
                            _estimate(numbers["accepted_length"], ".2f"),
                            _estimate(numbers["verified_token_acceptance"], ".1%"),
                            f"{numbers['verified']} of {numbers['drafted']}",
                            _value(numbers[_speed_key(report)], ".1f"),
                            _estimate(numbers["speed_up"], ".2f", "x"),
                        )
                    )
    return Table(
        title="Sweeps",
        columns=("drafter", "prompts from", "accepted length", "verified accepted", "verified", "tok/s", "speed-up"),
        rows=tuple(rows),
    )


def _reliability(drafters: Mapping[str, Numbers]) -> Table:
    rows = []
    for name, variants in drafters.items():
        for variant, numbers in variants.items():
            if numbers is None:
                continue
            for row in numbers["positions"]:
                rows.append((name, variant, f"prefix {row['position']}", *_truth(row)))
            rows.append((name, variant, "every token", *_truth(numbers["tokens"])))
    return Table(
        title="Confidence",
        columns=("drafter", "confidence", "of", "pairs", "ECE", "AUC", "Brier"),
        rows=tuple(rows),
        note="Of the rounds above, all verified in full. A prefix: its estimated survival against whether it was "
        "accepted. A token: its confidence, where all before it were accepted.",
    )


def _truth(row: Numbers) -> tuple[str, str, str, str]:
    area = row["area_under_roc"]
    return (
        str(row["count"]),
        f"{row['calibration_error']:.2%}",
        _NOTHING if area is None else f"{area:.3f}",
        f"{row['brier_score']:.4f}",
    )


def _speed_key(report: Numbers) -> str:
    """Which tokens a second are those of the speed-up."""
    return "tokens_per_second" if report["speed"]["of"] == "throughput" else "decode_tokens_per_second"


def _speed_note(report: Numbers) -> str:
    if report["speed"]["of"] == "throughput":
        return f"Speed is throughput at {report['speed']['concurrency']} answers at once: all tokens by all seconds."
    return "Speed is that of decoding one answer at a time: the prompt's own pass is in none of it."


def _lines(numbers: Numbers) -> Iterator[tuple[str, str, Numbers]]:
    """(level, name, numbers): benchmarks, domains, and all; a level of one group that says nothing new is left out."""
    domains, benchmarks = numbers["domains"], numbers["benchmarks"]
    if len(benchmarks) > 1:
        for name, found in benchmarks.items():
            yield "benchmarks", name, found
    for name, found in domains.items():
        yield "domains", f"all {name}" if name in benchmarks or len(benchmarks) > 1 else name, found
    if len(domains) > 1 or not domains:
        yield "overall", "all", numbers["overall"]


def _value(estimate: Numbers | None, form: str, unit: str = "") -> str:
    return _NOTHING if estimate is None else f"{estimate['value']:{form}}{unit}"


def _estimate(estimate: Numbers | None, form: str, unit: str = "") -> str:
    if estimate is None or estimate["interval"] is None:
        return _value(estimate, form, unit)
    low, high = estimate["interval"]
    return f"{estimate['value']:{form}}{unit} [{low:{form}}, {high:{form}}]"

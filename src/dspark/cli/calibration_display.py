"""How ``dspark calibrate`` shows what it found: tables, and a reliability diagram made of text."""

from __future__ import annotations

import math
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dspark.calibration.metrics import ReliabilityBins
from dspark.calibration.quality import Estimate
from dspark.calibration.regimes import CalibrationStudy, RegimeStudy

__all__ = ["show_study"]

_BAR_CELLS = 18


def show_study(study: CalibrationStudy, path: Path, page: Path, console: Console | None = None) -> None:
    """Print a study, and where its temperatures and its diagrams were written."""
    console = Console(highlight=False, emoji=False, markup=False) if console is None else console
    for regime in study.regimes:
        console.print(_quality_table(regime))
        console.print(_summary(regime))
        console.print(_diagram(regime))
    console.print(_temperature_table(study))
    console.print(_verdict(study))
    console.print(f"written: {path}, and the reliability diagrams to {page}", soft_wrap=True)


def _quality_table(regime: RegimeStudy) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        title=f"sampling temperature {regime.sampling_temperature:g}: survival of the first k draft tokens,"
        f" {regime.check_rounds:,} rounds of {regime.check_prompts} prompts that the fit did not see",
        title_justify="left",
    )
    for heading in ("k", "rounds", "ECE %", "after", "floor", "Brier", "after", "AUC", "after"):
        table.add_column(heading, justify="right", no_wrap=True)
    before, after = regime.before, regime.after
    for k in range(len(before.ece)):
        table.add_row(
            str(k + 1),
            f"{before.counts[k]:,}",
            _percent(before.ece[k]),
            _percent(after.ece[k]),
            f"{100 * after.perfect_ece[k]:.1f}",
            _plain(before.brier[k]),
            _plain(after.brier[k]),
            _plain(before.auc[k]),
            _plain(after.auc[k]),
        )
    table.add_section()
    perfect = sum(after.perfect_ece) / len(after.perfect_ece)
    table.add_row(
        "mean", "", _percent(before.mean_ece), _percent(after.mean_ece), f"{100 * perfect:.1f}", "", "",
        _plain(before.mean_auc), _plain(after.mean_auc),
    )  # fmt: skip
    return table


def _summary(regime: RegimeStudy) -> str:
    return (
        "± covers 95 % over prompts; `floor` is the ECE of exactly true confidences with as few rounds. AUC of one"
        f" token given those before it: {_plain(regime.after.token_auc)}; of survival, all"
        f" positions together: {_plain(regime.after.pooled_auc)}. Mean ECE saved: {_percent(regime.saved)} %."
    )


def _diagram(regime: RegimeStudy) -> str:
    """Claimed against accepted, by bins of claimed survival; the line is where true confidences would end."""
    before, after = regime.reliability_before, regime.reliability_after
    lines = [f"survival claimed, and accepted:{'before':>13}{'after':>33}"]
    for index in range(len(before.counts_K)):
        low, high = index / len(before.counts_K), (index + 1) / len(before.counts_K)
        lines.append(f"{low:4.0%} to {high:4.0%}  {_bar(before, index)}   {_bar(after, index)}".rstrip())
    return "\n".join(lines)


def _bar(bins: ReliabilityBins, index: int) -> str:
    if bins.counts_K[index] == 0:
        return " " * (_BAR_CELLS + 13)
    share, claimed = float(bins.accepted_share_K[index]), float(bins.mean_confidence_K[index])
    cells = ["█" if (cell + 0.5) / _BAR_CELLS <= share else " " for cell in range(_BAR_CELLS)]
    cells[min(int(claimed * _BAR_CELLS), _BAR_CELLS - 1)] = "│"
    return f"{''.join(cells)} {share:4.0%} {int(bins.counts_K[index]):7,}"


def _temperature_table(study: CalibrationStudy) -> Table:
    table = Table(box=SIMPLE_HEAD, title="temperatures by draft position", title_justify="left")
    table.add_column("fitted on")
    for k in range(len(study.shared)):
        table.add_column(str(k + 1), justify="right")
    table.add_column("own save %", justify="right")
    table.add_row("all rounds", *(f"{value:.2f}" for value in study.shared), "")
    for regime in study.regimes:
        table.add_row(
            f"at {regime.sampling_temperature:g}",
            *(f"{value:.2f}" for value in regime.own),
            _percent(regime.own_gain),
        )
    return table


def _verdict(study: CalibrationStudy) -> str:
    own = [f"{regime.sampling_temperature:g}" for regime in study.regimes if regime.keeps_own]
    if not own:
        return "One set of temperatures serves all sampling temperatures; it is what is kept."
    return f"Sampling temperature {', '.join(own)}: its own temperatures are truer by more than chance and are kept."


def _percent(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{100 * estimate.value:.1f}±{50 * _width(estimate):.1f}"


def _plain(estimate: Estimate) -> str:
    return "-" if math.isnan(estimate.value) else f"{estimate.value:.3f}±{_width(estimate) / 2:.3f}".replace("0.", ".")


def _width(estimate: Estimate) -> float:
    return estimate.high - estimate.low

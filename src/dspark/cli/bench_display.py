"""How ``dspark bench`` shows what it measured: a table by concurrency and policy, and whether outputs were the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["show_bench"]

PIPED_WIDTH = 120
"""Columns of tables that go to a file."""


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A number of the report, in the unit that is shown."""

    title: str
    key: str
    form: str
    scale: float = 1.0
    with_range: bool = False


_SPEEDS = (
    _Column(title="tokens/s", key="tokens_per_second", form=".1f", with_range=True),
    _Column(title="x off", key="against_off", form=".2f", with_range=True),
    _Column(title="x best fixed", key="against_best_fixed", form=".2f", with_range=True),
    _Column(title="tokens/s a user", key="user_tokens_per_second", form=".1f"),
    _Column(title="first token, ms", key="first_token_seconds", form=".0f", scale=1e3),
)
_STEPS = (
    _Column(title="accepted length", key="accepted_length", form=".2f"),
    _Column(title="drafted", key="drafted", form=".2f"),
    _Column(title="verified", key="verified", form=".2f"),
    _Column(title="accepted", key="accepted", form=".2f"),
    _Column(title="step, ms", key="step_seconds", form=".1f", scale=1e3),
    _Column(title="draft", key="draft_seconds", form=".1f", scale=1e3),
    _Column(title="schedule", key="schedule_seconds", form=".2f", scale=1e3),
    _Column(title="verify", key="verify_seconds", form=".1f", scale=1e3),
)


def show_bench(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the report of a benchmark."""
    console = Console(highlight=False, emoji=False, markup=False) if console is None else console
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    cells, settings = report["cells"], report["settings"]
    if not cells:
        console.print("nothing was measured to its end")
        return
    model = f"{settings['target']} in {settings['dtype']}, temperature {settings['temperature']:g}"
    console.print(_table(cells, _SPEEDS, f"speed: {model}"))
    console.print(_table(cells, _STEPS, "steps: draft tokens of a request, and time"))
    console.print(
        f"{settings['requests']} requests in each of {settings['rounds']} rounds: medians, and the lowest and highest"
        " round. * is the best fixed length; verified is the verify budget of a request."
    )
    for cell in cells:
        console.print(_sameness(cell, settings["dtype"]))


def _table(cells: Sequence[Mapping[str, Any]], columns: Sequence[_Column], title: str) -> Table:
    rows = [numbers for cell in cells for numbers in cell["policies"].values()]
    shown = [column for column in columns if any(numbers[column.key] is not None for numbers in rows)]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("concurrency", justify="right")
    table.add_column("policy")
    for column in shown:
        table.add_column(column.title, justify="right")
    for cell in cells:
        concurrency = f"{cell['concurrency']}"
        for policy, numbers in cell["policies"].items():
            name = f"{policy} *" if policy == cell["best_fixed"] else policy
            table.add_row(concurrency, name, *(_shown(numbers[column.key], column) for column in shown))
            concurrency = ""
        table.add_section()
    return table


def _shown(spread: Mapping[str, float] | None, column: _Column) -> str:
    if spread is None:
        return "-"
    middle, low, high = (format(column.scale * spread[name], column.form) for name in ("median", "low", "high"))
    return f"{middle} ({low}-{high})" if column.with_range and low != high else middle


def _sameness(cell: Mapping[str, Any], dtype: str) -> str:
    """Whether the policies gave the same answers."""
    begin = f"concurrency {cell['concurrency']}: "
    if cell["baseline"] is None:
        return begin + "sampled answers are not compared"
    others = {name: numbers for name, numbers in cell["policies"].items() if name != cell["baseline"]}
    if not others:
        return begin + "one policy alone has no answers to be compared with"
    wrong = {name: numbers for name, numbers in others.items() if numbers["differing_answers"]}
    if not wrong:
        compared = min(numbers["compared_answers"] for numbers in others.values())
        return begin + f"the same answers under every policy (at least {compared} compared, token by token)"
    counts = ", ".join(
        f"{name} {numbers['differing_answers']} of {numbers['compared_answers']}" for name, numbers in wrong.items()
    )
    told = "; in int8 on a CPU none should, please report it" if dtype == "int8" else "; they may part at near ties"
    return begin + f"answers that differ from those of {cell['baseline']}: {counts}{told}"

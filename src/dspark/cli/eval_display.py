"""What ``dspark eval`` shows: how far it is, and the tables of its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from dspark.evaluation.tables import report_tables

__all__ = ["PAGE_FILE", "REPORT_FILE", "answers_progress", "show_report"]

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"
PIPED_WIDTH = 140
"""Columns of tables that go to a file."""


def answers_progress(console: Console) -> Progress:
    """A bar with the answers so far; nothing where the console is quiet."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet,
    )


def show_report(report: Mapping[str, Any], out: Path | None) -> None:
    """Print all tables, what was left out, and where the files are."""
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    one_drafter = len(report["drafters"]) == 1
    for table in report_tables(report):
        shown = RichTable(
            title=table.title,
            caption=table.note or None,
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        # A column that says the same in every row says nothing.
        first = 1 if one_drafter and len({row[0] for row in table.rows}) <= 1 else 0
        for column in table.columns[first:]:
            shown.add_column(column)
        previous = ""
        for row in table.rows:
            cells = row[first:]
            shown.add_row("" if cells[0] == previous else cells[0], *cells[1:])
            previous = cells[0]
        console.print(shown)
    for name, reason in report["skipped"].items():
        console.print(f"left out {name}: {reason}")
    if report["completed"] + len(report["skipped"]) < report["prompts"]:
        console.print(f"{report['completed']} of {report['prompts']} prompts were answered in every way")
    if out is not None:
        console.print(f"report: {out / PAGE_FILE}, numbers: {out / REPORT_FILE}")

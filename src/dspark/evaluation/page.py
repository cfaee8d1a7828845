"""A report as one HTML page that needs nothing else: no script, no font, no image from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from dspark.evaluation.document import html_document, panels
from dspark.evaluation.figures import Figure, report_figures
from dspark.evaluation.tables import Table, report_tables

__all__ = ["report_page"]


def report_page(report: Mapping[str, Any]) -> str:
    """The page of a report; its numbers are the report's."""
    settings = report["settings"]
    drafters = ", ".join(drafter["label"] for drafter in report["drafters"])
    sampling = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    if settings["temperature"] != 0:
        sampling += ", seeded coupling" if settings["coupled"] else ", p/q rule"
    facts = [
        f"{report['completed']} prompts ({settings['prompts']})",
        f"target {settings['target']} in {settings['dtype']} on {settings['device']}",
        sampling,
        f"at most {settings['max_tokens']} tokens an answer, {report['speed']['concurrency']} at once",
        f"seed {settings['seed']}",
    ]
    body = [f"<p>{escape('; '.join(facts))}.</p>"]
    left = report["prompts"] - report["completed"] - len(report["skipped"])
    if left:
        body.append(f'<p class="warning">{left} of {report["prompts"]} prompts are not answered yet.</p>')
    if report["skipped"]:
        reasons = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in report["skipped"].items())
        body.append(f'<div class="warning"><p>Left out:</p><ul>{reasons}</ul></div>')
    tables = [_table(table) for table in report_tables(report)]
    figures = [_figure(figure) for figure in report_figures(report)]
    body += [*tables[:1], *figures, *tables[1:]]
    origin = {key: report[key] for key in ("settings", "drafters", "intervals", "sessions")}
    body.append(f"<h2>Where the numbers come from</h2><pre>{escape(json.dumps(origin, indent=2))}</pre>")
    return html_document(f"Evaluation of {drafters}", body)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _figure(figure: Figure) -> str:
    return f"<h2>{escape(figure.title)}</h2>{panels(figure.charts, figure.caption)}"

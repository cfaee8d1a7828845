"""A report as one HTML page that needs nothing else: no script, no font, no image from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from dspark.evaluation.charts import STYLE, legend, svg
from dspark.evaluation.figures import Figure, report_figures
from dspark.evaluation.tables import Table, report_tables

__all__ = ["report_page"]

_PAGE_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem }
th, td { padding: .25rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #8884 }
thead th { border-bottom-width: 2px }
.note, figcaption { opacity: .8; font-size: .87rem; max-width: 60rem }
figure { margin: 0 } .panels { display: flex; flex-wrap: wrap; gap: 1rem }
.legend span { margin-right: 1.1rem } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
pre { overflow-x: auto; font-size: .8rem } .warning { border-left: 4px solid #c4500c; padding-left: .8rem }
"""


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
        f"at most {settings['max_tokens']} tokens an answer",
        f"seed {settings['seed']}",
    ]
    body = [f"<h1>Evaluation of {escape(drafters)}</h1>", f"<p>{escape('; '.join(facts))}.</p>"]
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
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(f'Evaluation of {drafters}')}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _figure(figure: Figure) -> str:
    panels = "\n".join(svg(chart) for chart in figure.charts)
    labels = [series.label for series in max(figure.charts, key=lambda chart: len(chart.series)).series]
    return (
        f'<h2>{escape(figure.title)}</h2><figure>{legend(labels)}<div class="panels">{panels}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )

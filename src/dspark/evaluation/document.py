"""What the pages share: an HTML document that needs nothing else, with no script, font or image from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dspark.evaluation.charts import STYLE, Chart, legend, svg

__all__ = ["html_document", "panels"]

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


def html_document(title: str, body: Sequence[str]) -> str:
    """The whole document, the title above its body."""
    content = "\n".join([f"<h1>{escape(title)}</h1>", *body])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n"
        f"<body>\n{content}\n</body></html>\n"
    )


def panels(charts: Sequence[Chart], caption: str) -> str:
    """Charts side by side that share their series, under one legend."""
    labels = [series.label for series in max(charts, key=lambda chart: len(chart.series)).series]
    drawn = "\n".join(svg(chart) for chart in charts)
    return (
        f'<figure>{legend(labels)}<div class="panels">{drawn}</div><figcaption>{escape(caption)}</figcaption></figure>'
    )

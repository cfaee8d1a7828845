"""The reliability diagrams of a calibration as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from dspark.calibration.metrics import ReliabilityBins
from dspark.calibration.regimes import CalibrationStudy, RegimeStudy
from dspark.evaluation.charts import STYLE, Chart, Point, Series, legend, svg

__all__ = ["calibration_page"]

_PAGE_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem }
figure { margin: 0 } .panels { display: flex; flex-wrap: wrap; gap: 1rem }
figcaption { opacity: .8; font-size: .87rem; max-width: 60rem }
.legend span { margin-right: 1.1rem } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
"""


def calibration_page(study: CalibrationStudy, title: str) -> str:
    """One diagram a sampling temperature: survival of all prefixes, before and after, on the check half."""
    charts = [_chart(regime) for regime in study.regimes]
    panels = "\n".join(svg(chart) for chart in charts)
    labels = [series.label for series in charts[0].series]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{STYLE}</style></head>\n"
        f'<body>\n<h1>{escape(title)}</h1>\n<figure>{legend(labels)}<div class="panels">{panels}</div>'
        "<figcaption>Prefixes of drafts by the survival that was claimed for them, in 20 equal bins, against the share"
        " that was accepted, on prompts that the fit did not see. On the dashed line confidences are probabilities."
        "</figcaption></figure>\n</body></html>\n"
    )


def _chart(regime: RegimeStudy) -> Chart:
    before, after = regime.before.mean_ece.value, regime.after.mean_ece.value
    return Chart(
        title=f"temperature {regime.sampling_temperature:g}: mean ECE {before:.1%} to {after:.1%}",
        x_label="claimed survival",
        y_label="accepted",
        unit_square=True,
        percent=True,
        series=(
            _series("before", regime.reliability_before),
            _series("after calibration", regime.reliability_after),
        ),
    )


def _series(label: str, bins: ReliabilityBins) -> Series:
    pairs = zip(bins.mean_confidence_K, bins.accepted_share_K, bins.counts_K, strict=True)
    points = tuple(Point(x=float(claimed), y=float(share)) for claimed, share, count in pairs if count > 0)
    return Series(label=label, points=points)

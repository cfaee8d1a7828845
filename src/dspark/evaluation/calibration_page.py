"""The reliability diagrams of a calibration as one HTML page that needs nothing else."""

from __future__ import annotations

from dspark.calibration.metrics import ReliabilityBins
from dspark.calibration.regimes import CalibrationStudy, RegimeStudy
from dspark.evaluation.charts import Chart, Point, Series
from dspark.evaluation.document import html_document, panels

__all__ = ["calibration_page"]


def calibration_page(study: CalibrationStudy, title: str) -> str:
    """One diagram a sampling temperature: survival of all prefixes, before and after, on the check half."""
    caption = (
        "Prefixes of drafts by the survival that was claimed for them, in 20 equal bins, against the share that was"
        " accepted, on prompts that the fit did not see. On the dashed line confidences are probabilities."
    )
    return html_document(title, [panels([_chart(regime) for regime in study.regimes], caption)])


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

"""What a step costs, as one HTML page that needs nothing else: measured points and the curves laid through them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dspark.evaluation.charts import Chart, Point, Series
from dspark.evaluation.document import html_document, panels
from dspark.scheduling import DraftPoint, StepCost, VerifyPoint

__all__ = ["profile_page"]


def profile_page(
    cost: StepCost, verify: Iterable[VerifyPoint], draft: Iterable[DraftPoint], *, title: str, facts: str
) -> str:
    """Figures: a target step over its tokens, a draft over requests, what prompt tokens add.

    Args:
        cost: its curves over tokens and prompt tokens.
        verify: measured target steps, one series for each number of requests.
        draft: measured drafts, one series for each block length.
        title: of the page.
        facts: what was measured, in a line.
    """
    by_requests: dict[int, list[VerifyPoint]] = {}
    for point in sorted(verify, key=lambda point: (point.tokens, point.context_tokens)):
        alike = by_requests.setdefault(point.requests, [])
        if not alike or alike[-1].tokens < point.tokens:
            alike.append(point)  # with the shortest context
    steps = Chart(
        title="target step as measured",
        x_label="tokens in the step",
        y_label="ms",
        from_zero=True,
        series=tuple(
            Series(label=_requests(requests), points=_points((p.tokens, p.seconds) for p in points))
            for requests, points in sorted(by_requests.items())
        ),
    )
    curve = Chart(
        title="the curve laid through",
        x_label="tokens in the step",
        y_label="ms",
        from_zero=True,
        series=(Series(label="curve", points=_points(zip(cost.verify.sizes, cost.verify.seconds, strict=True))),),
    )
    by_length: dict[int, list[DraftPoint]] = {}
    for draft_point in draft:
        by_length.setdefault(draft_point.block_length, []).append(draft_point)
    drafts = Chart(
        title="draft",
        x_label="requests",
        y_label="ms",
        from_zero=True,
        series=tuple(
            Series(label=_tokens(length), points=_points((p.requests, p.seconds) for p in points))
            for length, points in sorted(by_length.items())
        ),
    )
    prompts = Chart(
        title="prompt tokens",
        x_label="prompt tokens in the step",
        y_label="ms more",
        from_zero=True,
        series=(Series(label="prompt", points=_points(zip(cost.prefill.sizes, cost.prefill.seconds, strict=True))),),
    )
    return html_document(
        title,
        [
            f"<p>{escape(facts)}.</p>",
            panels(
                [steps, curve],
                "Left: medians by requests in the step, with a short context. Right: what the scheduler goes by,"
                f" without the {1e3 * cost.seconds_per_request:.3g} ms for each request and the"
                f" {1e6 * cost.seconds_per_context_token:.3g} ms for 1,000 tokens of context, and"
                f" {1e6 * cost.seconds_per_attended_token:.3g} ms for each token of the step that sees them.",
            ),
            panels([drafts], "Seconds of drafting so many tokens for each request."),
            panels([prompts], "What prompt tokens add to a decoding step that they share."),
        ],
    )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _points(pairs: Iterable[tuple[int, float]]) -> tuple[Point, ...]:
    return tuple(Point(x=size, y=1e3 * seconds) for size, seconds in sorted(pairs))

from __future__ import annotations

import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.evaluation.charts import Chart, Point, Series, svg
from dspark.evaluation.figures import report_figures
from dspark.evaluation.page import report_page
from dspark.evaluation.plan import DrafterFacts, evaluation_arms
from dspark.evaluation.report import build_report
from dspark.evaluation.tables import report_tables
from tests.evaluation.made import answer, prompt, record, round_of

TWO = DrafterFacts(
    label="two <layers> & more",
    kind="dspark",
    num_layers=2,
    block_size=3,
    parameters=10,
    has_confidence_head=True,
    fingerprint="f",
    temperatures=(1.5, 0.7, 1.0),
)
FIVE = replace(TWO, label="five", num_layers=5, temperatures=None)
SETTINGS = {
    "target": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "prompts": "a,b",
    "temperature": 0.0,
    "coupled": False,
    "max_tokens": 8,
    "concurrency": 1,
    "seed": 0,
}


@pytest.fixture(scope="module")
def report():
    chance = random.Random(1)
    prompts = [prompt(f"a/{n}") for n in range(5)] + [prompt(f"b/{n}", domain="code") for n in range(4)]
    arms = evaluation_arms([TWO, FIVE], baseline=True, thresholds=(0.0, 0.5), draft_tokens=(1, 3))
    records = []
    for p in prompts:
        for arm in arms:
            rounds = []
            for _ in range(12):
                drafted = 0 if arm.drafter is None else arm.draft_tokens or 3
                verified = min(drafted, 2) if arm.threshold else drafted
                logits = [chance.gauss(0, 1) for _ in range(drafted)]
                rounds.append(round_of(chance.randint(0, verified), drafted=drafted, verified=verified, logits=logits))
            seconds = chance.uniform(2, 3)
            records.append(record(arm.label, p.id, answer(rounds, seconds=seconds, token_ids=range(20))))
    sessions = [{"commit": "c0ffee <dirty>"}]
    return build_report(
        prompts, [TWO, FIVE], arms, records, settings=SETTINGS, repeatable=True, seed=0, sessions=sessions
    )


def elements(page):
    body = page.split("\n", 1)[1]  # without the doctype
    return ElementTree.fromstring(body)


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(report):
    page = report_page(report)
    root = elements(page)
    assert root.tag == "html"
    for element in root.iter():
        assert element.tag not in {"script", "link", "img", "iframe", "object", "embed", "image", "use"}
        assert not {"src", "href", "srcset", "data"} & element.attrib.keys()
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert "c0ffee &lt;dirty&gt;" in page


def test_the_page_has_the_figures_that_were_measured(report):
    titles = [element.text for element in elements(report_page(report)).iter("h2")]
    for wanted in ("Fig. 2", "Fig. 3", "Fig. 4", "Fig. 5", "Fig. 6"):
        assert any(wanted in (title or "") for title in titles), wanted
    names = [figure.name for figure in report_figures(report)]
    assert len(set(names)) == len(names)


def test_figures_of_what_was_not_measured_are_left_out(report):
    kept = [arm for arm in report["arms"] if arm["label"] == "five"]
    plain = report | {"arms": kept, "reliability": {"five": None}, "comparisons": []}
    assert [figure.name for figure in report_figures(plain)] == ["acceptance-by-position"]
    elements(report_page(plain))


def test_numbers_in_tables_and_points_are_the_reports(report):
    root = elements(report_page(report))
    first = root.find(".//table/tbody")
    assert first is not None
    rows = {tuple(cell.text for cell in row)[:2]: [cell.text for cell in row] for row in first}
    by_label = {arm["label"]: arm for arm in report["arms"]}
    for label in (TWO.label, "five"):
        numbers = by_label[label]["overall"]
        row = rows[label, "all"]
        value, (low, high) = numbers["accepted_length"]["value"], numbers["accepted_length"]["interval"]
        assert row[3] == f"{value:.2f} [{low:.2f}, {high:.2f}]"
        assert row[4] == f"{numbers['verified_token_acceptance']['value']:.1%}"
        assert row[7] is not None
        assert row[7].startswith(f"{numbers['speed_up']['value']:.2f}x")
        assert row[8] == f"{numbers['identical']} of {numbers['answers']}"
    tooltips = {element.text for element in root.iter("title")}
    survival = by_label["five"]["domains"]["code"]["positions"][2]["prefix_survival"]
    low, high = survival["interval"]
    assert f"five: 3, {survival['value']:.4g} [{low:.4g}, {high:.4g}]" in tooltips
    for threshold, arm in ((0, by_label["five"]), (0.5, by_label["five, threshold 0.5"])):
        value = arm["domains"]["math"]["verified_token_acceptance"]
        low, high = value["interval"]
        assert f"math: {threshold:g}, {value['value']:.4g} [{low:.4g}, {high:.4g}]" in tooltips


def test_reliability_has_both_confidences_of_a_calibrated_drafter(report):
    assert report["reliability"]["five"]["calibrated"] is None
    ours = report["reliability"][TWO.label]
    raw, calibrated = ours["raw"]["positions"], ours["calibrated"]["positions"]
    assert [row["position"] for row in raw] == [1, 2, 3]
    assert raw[0]["count"] == 9 * 12
    assert raw[0]["calibration_error"] != calibrated[0]["calibration_error"]
    mean = sum(row["calibration_error"] for row in raw) / 3
    assert ours["raw"]["mean_calibration_error"] == pytest.approx(mean)


def test_prompts_may_be_called_anything():
    names = ["all prompts/0", "mbpp/0"]
    for chosen in (names[:1], names):
        prompts = [prompt(name, domain="all of it") for name in chosen]
        facts = [replace(FIVE, has_confidence_head=False)]
        arms = evaluation_arms(facts, baseline=True)
        records = [
            record(arm.label, p.id, answer([round_of(0, drafted=0 if arm.drafter is None else 3)]))
            for p in prompts
            for arm in arms
        ]
        made = build_report(prompts, facts, arms, records, settings=SETTINGS, repeatable=True, seed=0, sessions=[])
        alone = {row[1]: row[6] for row in report_tables(made)[0].rows}
        assert set(alone.values()) == {"1.0"}
        assert len(alone) == (1 if len(chosen) == 1 else 3)


def test_an_unfinished_evaluation_says_so(report):
    page = report_page(report | {"prompts": report["completed"] + 3, "skipped": {"a/9": "too <long>"}})
    assert "2 of 12 prompts are not answered yet" in page
    assert "a/9: too &lt;long&gt;" in page


def test_nothing_answered_still_gives_a_page():
    empty = build_report(
        [prompt("a/0")],
        [FIVE],
        evaluation_arms([FIVE], baseline=True),
        [],
        settings=SETTINGS,
        repeatable=True,
        seed=0,
        sessions=[],
    )
    assert report_tables(empty)[0].rows[0][3] == "-"
    assert "1 of 1 prompts are not answered yet" in report_page(empty)


@given(
    ys=st.lists(st.floats(-1e6, 1e6, allow_nan=False), max_size=12),
    square=st.booleans(),
    from_zero=st.booleans(),
)
def test_every_chart_is_well_formed_and_its_points_are_inside(ys, square, from_zero):
    if square:
        ys = [abs(y) / 1e6 for y in ys]
    points = tuple(
        Point(x=n / 12 if square else float(n), y=y, interval=(y, y) if n % 2 else None) for n, y in enumerate(ys)
    )
    chart = Chart(
        title="<a>",
        x_label="x & y",
        y_label='"y"',
        series=(Series(label="s", points=points),),
        unit_square=square,
        from_zero=from_zero,
    )
    circles = list(ElementTree.fromstring(svg(chart)).iter("circle"))
    assert len(circles) == len(ys)
    for circle in circles:
        assert 0 <= float(circle.attrib["cx"]) <= 340
        assert 0 <= float(circle.attrib["cy"]) <= 240

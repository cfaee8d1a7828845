"""Our numbers for docs/paper-claims.md, out of the reports of `dspark eval` and `dspark calibrate`.

    python benchmarks/claims.py --sweeps SWEEPS/report.json --kinds KINDS/report.json

The page says which commands make the two reports. The shipped drafter's calibration.json is read as well, and beside
OUT comparison.json, comparison-decoding.json, ablations.json and head-latency.json. Writes OUT and prints its tables
in Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.files import write_json

Numbers = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
CALIBRATION = Path(__file__).parents[1] / "src/dspark/assets/smollm2-135m-instruct/calibration.json"
NAMES = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
HELD_OUT = {"dspark (markov head)": "DSpark", "dflash": "DFlash", "eagle3": "Eagle3"}
HEADS = ("the defaults", "gated head", "RNN head")
DOMAINS = ("math", "code", "chat")
SHOWN_POSITIONS = (1, 3, 5, 7)


def main() -> None:
    """Extract, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=Path, required=True, help="report of the shipped drafter's two sweeps")
    parser.add_argument("--kinds", type=Path, required=True, help="report of the three kinds and their draft lengths")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--out", type=Path, default=RESULTS / "claims.json")
    arguments = parser.parse_args()
    sweeps, kinds, calibration = (read(path) for path in (arguments.sweeps, arguments.kinds, arguments.calibration))
    held_out, earlier, ablations, head_latency = (
        read(arguments.out.parent / name)
        for name in ("comparison.json", "comparison-decoding.json", "ablations.json", "head-latency.json")
    )
    claims = {
        "sources": {
            "sweeps": report_source(sweeps),
            "kinds": report_source(kinds),
            "calibration": calibration_source(calibration),
            "held_out": {"file": "comparison.json", **held_out["provenance"]},
            "earlier_kinds": {
                "file": "comparison-decoding.json",
                "settings": earlier["settings"],
                **earlier["provenance"],
            },
            "heads": {"file": "ablations.json", **ablations["provenance"]},
            "head_latency": {"file": "head-latency.json", **head_latency["provenance"]},
        },
        "kinds": kinds_compared(kinds),
        "earlier_kinds": kinds_compared(earlier),
        "acceptance_by_position": {
            "decoding": {NAMES[arm["label"]]: by_position(arm) for arm in kinds["arms"] if arm["label"] in NAMES},
            "held_out": {
                HELD_OUT[run["name"].lower()]: rounded(run["sampled"]["conditional_acceptance"])
                for run in held_out["runs"]
                if run["name"].lower() in HELD_OUT
            },
        },
        "draft_tokens": {
            "shipped_greedy": {"DSpark": by_draft_tokens(sweeps, "embedded")},
            "kinds": {name: by_draft_tokens(kinds, label) for label, name in NAMES.items()},
        },
        "heads": {name: heads_compared(ablations, name) for name in HEADS},
        "head_latency": rounded(head_latency["cells"]),
        "thresholds": by_threshold(sweeps),
        "confidence": {
            "fresh_prompts": [fresh(regime) for regime in calibration["dspark"]["regimes"]],
            "benchmark_prompts_greedy": on_benchmarks(sweeps["reliability"]["embedded"]),
        },
    }
    write_json(arguments.out, claims, indent=None)
    print("\n\n".join(tables(claims)))


# ---- extraction ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Numbers:
    """A JSON file."""
    content: Numbers = json.loads(path.read_text(encoding="utf-8"))
    return content


def rounded(value: Any) -> Any:
    """Five digits after the point; null where an interval has no bounds."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def report_source(report: Numbers) -> Numbers:
    """Settings and provenance of a report, with names of files only."""
    sessions = [
        {**session, "command": " ".join(map(without_folders, session["command"].split()))}
        for session in report["sessions"]
    ]
    drafters = [
        {key: value for key, value in drafter.items() if key != "temperatures"} for drafter in report["drafters"]
    ]
    return {"settings": report["settings"], "drafters": drafters, "prompts": report["completed"], "sessions": sessions}


def without_folders(word: str) -> str:
    """``--drafter dflash=/a/b/dflash/drafter`` names the run, which lies above the drafter."""
    name, equals, path = word.rpartition("=")
    parts = [part for part in path.split("/") if part != "drafter"]
    return name + equals + parts[-1]


def calibration_source(calibration: Numbers) -> Numbers:
    """What was fitted on what, and where."""
    details = calibration["dspark"]
    return {
        "file": CALIBRATION.name,
        "prompts": calibration["dataset"],
        "rounds": calibration["num_samples"],
        **{key: details[key] for key in ("drafter", "target", "date", "options", "versions", "machine")},
    }


def kinds_compared(report: Numbers) -> Numbers:
    """Accepted lengths with whole blocks by domain, and DSpark against each other kind, paired."""
    lengths: Numbers = {}
    for arm in report["arms"]:
        name = NAMES.get(arm.get("label", arm["drafter"]).lower())
        if name is not None:
            domains = {domain: group["accepted_length"] for domain, group in arm["domains"].items()}
            mean = sum(length["value"] for length in domains.values()) / len(domains)
            lengths[name] = {
                "prompts": arm["overall"]["prompts"],
                "all": rounded(arm["overall"]["accepted_length"]),
                **rounded(domains),
                "mean_of_domains": rounded(mean),
            }
    minus = {
        NAMES[pair["other"].lower()]: negated(pair.get("overall", pair)["accepted_length_difference"])
        for pair in report["comparisons"]
        if pair["reference"].lower() == "dspark" and pair["other"].lower() in NAMES
    }
    relative = {
        other: round(lengths["DSpark"]["mean_of_domains"] / lengths[other]["mean_of_domains"] - 1, 5) for other in minus
    }
    return {"accepted_length": lengths, "dspark_minus": minus, "dspark_relative_mean_of_domains": relative}


def negated(estimate: Numbers) -> Numbers:
    """Reports have the other minus the reference."""
    low, high = estimate["interval"]
    return {"value": round(-estimate["value"], 5), "interval": [round(-high, 5), round(-low, 5)]}


def by_position(arm: Numbers) -> Numbers:
    """Conditional acceptance with how many rounds got there."""
    return {
        name: [
            {"position": at["position"], "reached": at["reached"], **rounded(at["conditional_acceptance"] or {})}
            for at in group["positions"]
        ]
        for name, group in {"all": arm["overall"], **arm["domains"]}.items()
    }


def by_draft_tokens(report: Numbers, drafter: str) -> list[Numbers]:
    """Accepted length for every number of draft tokens, all of them verified."""
    block = next(facts["block_size"] for facts in report["drafters"] if facts["label"] == drafter)
    points = [
        {
            "draft_tokens": arm["draft_tokens"] or block,
            "all": rounded(arm["overall"]["accepted_length"]),
            **{domain: rounded(group["accepted_length"]) for domain, group in arm["domains"].items()},
        }
        for arm in report["arms"]
        if arm["drafter"] == drafter and arm["threshold"] is None
    ]
    return sorted(points, key=lambda point: int(point["draft_tokens"]))


def heads_compared(ablations: Numbers, name: str) -> float:
    """Held-out accepted length at temperature 1 of a short run."""
    return next(float(round(run["sampled"]["value"], 5)) for run in ablations["runs"] if run["name"] == name)


def by_threshold(report: Numbers) -> list[Numbers]:
    """What the sweep verified and what was accepted; threshold 0 is the drafter as it comes."""
    points = []
    for arm in report["arms"]:
        if arm["draft_tokens"] is None:
            groups = {"all": arm["overall"], **arm["domains"]}
            points.append({"threshold": arm["threshold"] or 0.0, **{name: pruned(g) for name, g in groups.items()}})
    return points


def pruned(group: Numbers) -> Numbers:
    """``with_target_token`` counts the target's own token of a round among the verified and the accepted."""
    rounds, verified, accepted = group["rounds"], group["verified"], group["accepted"]
    return {
        "rounds": rounds,
        "verified": verified,
        "accepted": accepted,
        "verified_share_of_drafted": round(verified / group["drafted"], 5),
        "verified_token_acceptance": rounded(group["verified_token_acceptance"]),
        "with_target_token": round((accepted + rounds) / (verified + rounds), 5),
        "accepted_length": rounded(group["accepted_length"]),
    }


def fresh(regime: Numbers) -> Numbers:
    """Calibration on the half that the fit did not see."""

    def quality(side: str) -> Numbers:
        part = regime[side]
        return {
            "ece": [estimate(value) for value in part["ece"]],
            "auc": [estimate(value) for value in part["auc"]],
            "mean_ece": estimate(part["mean_ece"]),
            "mean_auc": estimate(part["mean_auc"]),
            "pooled_auc": estimate(part["pooled_auc"]),
            "floor": round(sum(part["perfect_ece"]) / len(part["perfect_ece"]), 5),
        }

    return {
        "sampling_temperature": regime["sampling_temperature"],
        "check_rounds": regime["check_rounds"],
        "check_prompts": regime["check_prompts"],
        "before": quality("before"),
        "after": quality("after"),
    }


def estimate(bounds: Numbers) -> Numbers:
    """As in the reports of an evaluation."""
    return {"value": round(bounds["value"], 5), "interval": [round(bounds["low"], 5), round(bounds["high"], 5)]}


def on_benchmarks(reliability: Numbers) -> Numbers:
    """Calibration on the benchmark prompts."""
    return {
        name: {
            "mean_ece": rounded(side["mean_calibration_error"]),
            "ece": [rounded(at["calibration_error"]) for at in side["positions"]],
            "auc": [rounded(at["area_under_roc"]) for at in side["positions"]],
        }
        for name, side in reliability.items()
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(claims: Numbers) -> Iterable[str]:
    """In the order of the page."""
    yield table(
        [
            "accepted length, temperature 1",
            *DOMAINS,
            "mean of domains",
            "DSpark minus it, all prompts",
            "relative, mean of domains",
        ],
        [row for run in ("kinds", "earlier_kinds") for row in length_rows(claims[run])],
    )
    decoding, held_out = claims["acceptance_by_position"]["decoding"], claims["acceptance_by_position"]["held_out"]
    yield table(
        ["acceptance at", *map(str, range(1, 8))],
        [
            *(
                [
                    f"{name}, decoding",
                    *(f"{spread(at)} of {at['reached']:,}" if "value" in at else "" for at in row["all"]),
                ]
                for name, row in decoding.items()
            ),
            *([f"{name}, held out", *(f"{value:.3f}" for value in row)] for name, row in held_out.items()),
        ],
    )
    kinds = claims["draft_tokens"]["kinds"]
    counts = [point["draft_tokens"] for point in kinds["DSpark"]]
    ratios = [
        ours["all"]["value"] / theirs["all"]["value"]
        for ours, theirs in zip(kinds["DSpark"], kinds["DFlash"], strict=True)
    ]
    yield table(
        ["draft tokens", *map(str, counts)],
        [
            *([name, *(spread(point["all"]) for point in points)] for name, points in kinds.items()),
            ["DSpark over DFlash", *map(gain, ratios)],
        ],
    )
    shipped = claims["draft_tokens"]["shipped_greedy"]["DSpark"]
    yield table(
        ["draft tokens", *(str(point["draft_tokens"]) for point in shipped)],
        [["shipped drafter, greedy", *(spread(point["all"]) for point in shipped)]],
    )
    yield table(
        ["requests", "draft tokens", "draft, ms", "without heads, ms", "whole round, ms", "heads add"],
        (
            [
                str(cell["requests"]),
                str(cell["draft_tokens"]),
                f"{cell['draft_ms']['DSpark']:.1f}",
                f"{cell['draft_ms']['without heads']:.1f}",
                f"{cell['round_ms']:.1f}",
                percent(cell["added_share"]),
            ]
            for cell in claims["head_latency"]
        ),
    )
    yield table(
        ["threshold", *(f"{domain}: accepted of verified" for domain in DOMAINS), "accepted length"],
        (
            [
                f"{point['threshold']:g}",
                *(
                    f"{share(point[domain]['verified_token_acceptance'])} of {point[domain]['verified']:,}"
                    f" ({percent(point[domain]['verified_share_of_drafted'])} of drafted);"
                    f" {percent(point[domain]['with_target_token'])}"
                    for domain in DOMAINS
                ),
                spread(point["all"]["accepted_length"]),
            ]
            for point in claims["thresholds"]
        ),
    )
    yield confidence_table(claims["confidence"])


def length_rows(run: Numbers) -> Iterable[list[str]]:
    """A row for each kind; a run may lack a domain."""
    minus, relative = run["dspark_minus"], run["dspark_relative_mean_of_domains"]
    for name, row in run["accepted_length"].items():
        yield [
            f"{name}, {row['prompts']} prompts",
            *(spread(row[domain]) if domain in row else "" for domain in DOMAINS),
            f"{row['mean_of_domains']:.2f}",
            spread(minus[name]) if name in minus else "",
            gain(1 + relative[name]) if name in minus else "",
        ]


def confidence_table(confidence: Numbers) -> str:
    """ECE before and after at the positions that the paper shows, and AUC."""
    benchmarks = confidence["benchmark_prompts_greedy"]

    def row(name: str, before: Numbers, after: Numbers, mean: Callable[[Numbers], str], floor: str) -> list[str]:
        pairs = [
            f"{percent(value_of(before['ece'][at - 1]))} → {percent(value_of(after['ece'][at - 1]))}"
            for at in SHOWN_POSITIONS
        ]
        aucs = " / ".join(f"{value_of(after['auc'][at - 1]):.2f}" for at in SHOWN_POSITIONS)
        return [name, *pairs, f"{mean(before)} → {mean(after)}", floor, aucs]

    return table(
        [
            "ECE, sampling temperature",
            *(f"position {at}" for at in SHOWN_POSITIONS),
            "mean of 7",
            "floor",
            "AUC at " + ", ".join(map(str, SHOWN_POSITIONS)),
        ],
        [
            *(
                row(
                    f"fresh prompts, {regime['sampling_temperature']:g}",
                    regime["before"],
                    regime["after"],
                    lambda side: share(side["mean_ece"]),
                    percent(regime["after"]["floor"]),
                )
                for regime in confidence["fresh_prompts"]
            ),
            row(
                "benchmark prompts, 0",
                benchmarks["raw"],
                benchmarks["calibrated"],
                lambda side: percent(side["mean_ece"]),
                "",
            ),
        ],
    )


def value_of(number: Any) -> float:
    """Of an estimate or a plain number."""
    return float(number["value"] if isinstance(number, Mapping) else number)


def spread(number: Numbers) -> str:
    """Value and interval."""
    if number["interval"] is None:
        return f"{number['value']:.2f}"
    low, high = number["interval"]
    return f"{number['value']:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")


def share(number: Numbers | None) -> str:
    """Value and interval in percent."""
    if number is None:
        return "none"
    low, high = number["interval"]
    return f"{percent(number['value'])} [{100 * low:.1f}, {100 * high:.1f}]"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def gain(ratio: float) -> str:
    """Of a ratio, with its sign."""
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()

"""The comparison as Markdown: medians over the rounds, in brackets the lowest and the highest of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Rounds = Sequence[Mapping[str, Any]]


def tables(results: Mapping[str, Any]) -> str:
    """All tables of a run."""
    rounds = results["rounds"]
    parts = [_throughput(results), _single(rounds), _ratios(rounds)]
    if rounds[0]["steps"]:
        parts += [
            _steps(rounds, "requests", "requests, one token each"),
            _steps(rounds, "tokens", "tokens of one request"),
        ]
    return "\n\n".join([*parts, _facts(results)])


def speeds(rounds: Rounds, peer: str, concurrency: int, domain: str | None = None) -> list[float] | None:
    """Generated tokens per second, by round, over all cells of a concurrency (or one domain of it).

    None where the peer was not measured.
    """
    found = []
    for one in rounds:
        turns = [
            cell["peers"].get(peer)
            for cell in one["cells"].values()
            if cell["concurrency"] == concurrency and domain in (None, cell["domain"])
        ]
        if not turns or None in turns:
            return None
        found.append(sum(turn["tokens"] for turn in turns) / sum(turn["seconds"] for turn in turns))
    return found


def _throughput(results: Mapping[str, Any]) -> str:
    """Tokens per second of all requests together; the last columns tell of the whole run."""
    rounds = results["rounds"]
    levels = _levels(rounds)
    header = ["tokens/s of all requests at once", *map(str, levels), "same tokens as ours", "memory, GiB", "idle CPU"]
    lines = []
    for peer in results["peers"]:
        cells = [turns[peer]["agreement"] for turns in _turns(rounds) if peer in turns]
        memory = max(one["resident_bytes"][peer] for one in rounds) / 2**30
        idle = max(one["idle_cpu_share"][peer] for one in rounds)
        line = [peer, *(_shown(speeds(rounds, peer, level)) for level in levels)]
        lines.append([*line, f"{sum(cells) / len(cells):.0%}", f"{memory:.2f}", f"{idle:.1%}"])
    return _markdown(header, lines)


def _single(rounds: Rounds) -> str:
    """One request at a time, by domain."""
    if 1 not in _levels(rounds):
        return "One request at a time was not measured."
    domains = [cell["domain"] for cell in _cells(rounds[0], 1)]
    header = ["tokens/s, one request at a time", *domains, "all", "after the first token"]
    lines = []
    for peer in rounds[0]["order"]:
        decode = [
            median(cell["peers"][peer]["user_tokens_per_second"] or 0.0 for cell in _cells(one, 1)) for one in rounds
        ]
        each = [speeds(rounds, peer, 1, domain) for domain in (*domains, None)]
        lines.append([peer, *map(_shown, each), _shown(decode)])
    return _markdown(header, sorted(lines))


def _ratios(rounds: Rounds) -> str:
    """The best of ours against the best of others, round by round."""
    peers = sorted(rounds[0]["order"])
    ours = [peer for peer in peers if peer.startswith("dspark")]
    groups = {
        "dspark-off": ["dspark-off"],
        "best of llama.cpp": [peer for peer in peers if peer.startswith("llama.cpp")],
        "best of vllm": [peer for peer in peers if peer.startswith("vllm")],
        "best of transformers": [peer for peer in peers if peer.startswith("transformers")],
    }
    domains = [cell["domain"] for cell in _cells(rounds[0], 1)]
    columns: list[tuple[int, str | None]] = [(1, domain) for domain in domains]
    columns += [(level, None) for level in _levels(rounds)]
    lines = []
    for label, others in groups.items():
        if not others:
            continue
        line = [label]
        for column in columns:
            own, other = _best(rounds, ours, *column), _best(rounds, others, *column)
            if own is None or other is None:
                line.append("")
                continue
            pairs = zip(speeds(rounds, own, *column) or [], speeds(rounds, other, *column) or [], strict=True)
            line.append(f"{_shown([a / b for a, b in pairs])} {own} / {other}")
        lines.append(line)
    names = [str(level) if domain is None else f"{level} {domain}" for level, domain in columns]
    return _markdown(["best of ours against", *names], lines)


def _best(rounds: Rounds, peers: Sequence[str], level: int, domain: str | None) -> str | None:
    known = {peer: median(found) for peer in peers if (found := speeds(rounds, peer, level, domain)) is not None}
    return max(known, key=lambda peer: known[peer], default=None)


def _steps(rounds: Rounds, kind: str, label: str) -> str:
    """Milliseconds of one pass."""
    peers = sorted(rounds[0]["steps"])
    counts = list(rounds[0]["steps"][peers[0]][kind])
    lines = [
        [peer, *(_shown([one["steps"][peer][kind][count] for one in rounds]) for count in counts)] for peer in peers
    ]
    return _markdown([f"ms of a pass by {label}", *counts], lines)


def _facts(results: Mapping[str, Any]) -> str:
    settings, machine, rounds = results["settings"], results["provenance"]["machine"], len(results["rounds"])
    return (
        f"{settings['target']} on {machine['processor']}, {settings['threads']} threads; {settings['tokens']} tokens an"
        f" answer, prompts of {settings['mean_prompt_tokens']:.0f} tokens on average from"
        f" {', '.join(settings['prompts'])}; {rounds} round{'s' if rounds > 1 else ''}; commit"
        f" {results['provenance']['commit']}."
    )


def _levels(rounds: Rounds) -> list[int]:
    return sorted({cell["concurrency"] for cell in rounds[0]["cells"].values()})


def _cells(one_round: Mapping[str, Any], concurrency: int) -> list[Mapping[str, Any]]:
    return [cell for cell in one_round["cells"].values() if cell["concurrency"] == concurrency]


def _turns(rounds: Rounds) -> list[Mapping[str, Any]]:
    return [cell["peers"] for one in rounds for cell in one["cells"].values()]


def _shown(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    digits = 0 if median(values) >= 100 else 1 if median(values) >= 10 else 2
    shown = f"{median(values):.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)

"""How ``dspark profile`` shows what a step costs: tables, and what they mean."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dspark.engine.profile import StoredProfile
from dspark.scheduling import StepCost

__all__ = ["facts_line", "show_profile"]


def show_profile(profile: StoredProfile, path: Path, console: Console | None = None) -> None:
    """Print a profile, and where it is kept."""
    console = Console(highlight=False, emoji=False, markup=False) if console is None else console
    console.print(facts_line(profile))
    console.print(_token_table(profile.cost))
    console.print(_request_table(profile))
    console.print(_meaning(profile))
    console.print(f"kept in {path}", soft_wrap=True)


def facts_line(profile: StoredProfile) -> str:
    """What was measured, where and when."""
    key = profile.key
    return (
        f"{key.target} in {key.dtype} on {key.hardware}, threads: {key.threads};"
        f" drafter {key.drafter.partition(',')[0]}, block of {key.block_size}; up to {key.max_concurrency} requests at"
        f" once; measured {profile.measured_at} in {profile.seconds_taken:.0f} s"
    )


def _token_table(cost: StepCost) -> Table:
    """Every size that was measured, or, where there are many, those that double."""
    table = Table(box=SIMPLE_HEAD, title="target step, by tokens in it", title_justify="left")
    for name in ("tokens", "ms", "of one token", "ms a token"):
        table.add_column(name, justify="right")
    largest = cost.verify.sizes[-1]
    sizes = sorted({min(2**power, largest) for power in range(largest.bit_length() + 1)})
    one = float(cost.verify_seconds(0, requests=1, context_tokens=0))
    for size in sizes:
        seconds = float(cost.verify(size)) + cost.seconds_per_request
        table.add_row(f"{size}", f"{1e3 * seconds:.1f}", f"{seconds / one:.2f}x", f"{1e3 * seconds / size:.2f}")
    return table


def _request_table(profile: StoredProfile) -> Table:
    cost, block = profile.cost, profile.key.block_size
    table = Table(box=SIMPLE_HEAD, title="a round, by requests decoding together, in ms", title_justify="left")
    lengths = sorted({1, block})
    for name in ("requests", "no draft", *(f"draft {n}" for n in lengths), f"verify {block}", "pays from"):
        table.add_column(name, justify="right")
    for requests in sorted({point.requests for point in profile.points.draft}):
        alone = float(cost.verify_seconds(0, requests=requests, context_tokens=0))
        table.add_row(
            f"{requests}",
            f"{1e3 * alone:.1f}",
            *(f"{1e3 * float(cost.draft_seconds(requests, length)):.1f}" for length in lengths),
            f"{1e3 * float(cost.verify_seconds(block * requests, requests=requests, context_tokens=0)):.1f}",
            f"{_break_even(cost, requests, block):.2f}",
        )
    return table


def _meaning(profile: StoredProfile) -> str:
    cost, block = profile.cost, profile.key.block_size
    alone = float(cost.verify_seconds(0, requests=1, context_tokens=0))
    whole = float(cost.verify_seconds(block, requests=1, context_tokens=0))
    sizes = [size for size in (16, 64, 256) if size <= cost.prefill.sizes[-1]] or [cost.prefill.sizes[-1]]
    prefill = ", ".join(f"{size}: {1e3 * cost.prefill_seconds(size):.1f}" for size in sizes)
    return (
        f"Verifying {block} draft tokens of one request costs {whole / alone:.2f} x one token. `pays from` is the"
        " accepted length (tokens a round) from which drafting and verifying whole blocks is faster than no drafter;"
        " the scheduler verifies less where that pays more.\n"
        f"Prompt tokens add to a step, in ms: {prefill}. Each request adds {1e3 * cost.seconds_per_request:.2f} ms."
        f" 1,000 tokens of context add {1e6 * cost.seconds_per_context_token:.2f} ms to a step, and"
        f" {1e6 * cost.seconds_per_attended_token:.2f} ms for each token of the step that sees them."
        f" Choosing lengths takes {1e3 * cost.schedule_seconds:.2f} ms."
    )


def _break_even(cost: StepCost, requests: int, block: int) -> float:
    """Tokens that a round of whole blocks has to commit for each request to be as fast as rounds without a draft."""
    alone = float(cost.verify_seconds(0, requests=requests, context_tokens=0))
    whole = float(cost.verify_seconds(block * requests, requests=requests, context_tokens=0))
    return (whole + float(cost.draft_seconds(requests, block)) + cost.schedule_seconds) / alone

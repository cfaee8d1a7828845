"""What ``dspark demo`` shows to people: marked answers as they stream, then the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.cli.comparison import Report, tokens_per_second

if TYPE_CHECKING:
    from dspark.cli.models import Models
    from dspark.cli.prompts import Prompt
    from dspark.decoding.settings import SamplingSettings
    from dspark.engine.result import GenerationResult, RoundEvent

ACCEPTED_STYLE = "green underline"


class AcceptedText:
    """Splits the text of each round into what the drafter proposed and what the target added.

    The text shown lags behind the tokens when a character is spread over several of them, so the split is made on the
    whole answer's text, not on the round's tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._shown = 0

    def split(self, event: RoundEvent) -> tuple[str, str]:
        accepted_ids = self._token_ids + list(event.token_ids[: event.accepted])
        complete = self._tokenizer.decode(accepted_ids, skip_special_tokens=True).rstrip("\ufffd")
        cut = min(max(len(complete) - self._shown, 0), len(event.text)) if event.accepted else 0
        self._token_ids += event.token_ids
        self._shown += len(event.text)
        return event.text[:cut], event.text[cut:]


@dataclass(frozen=True, kw_only=True)
class Display:
    """Everything the demo prints for people."""

    console: Console

    @property
    def _styled(self) -> bool:
        return self.console.is_terminal and self.console.color_system is not None

    def introduce(
        self, models: Models, settings: SamplingSettings, *, device: str, max_draft_tokens: int | None
    ) -> None:
        mode = "greedy" if settings.is_greedy else f"temperature {settings.temperature:g}"
        seed = "" if settings.seed is None else f", seed {settings.seed}"
        place = f"{models.target.model.compute_dtype} on {device}"
        line = f"{models.target.name}, {place}, {mode}{seed}; drafter: {models.drafter_name}"
        if max_draft_tokens is not None:
            line += f", {max_draft_tokens} tokens a round"
        self.console.print(Text(line, style="dim"))
        mark = Text("like this", style=ACCEPTED_STYLE) if self._styled else Text("«like this»")
        self.console.print(Text("Draft tokens that the target accepted are marked ") + mark + ".")

    def prompt(self, place: str, prompt: Prompt) -> None:
        self.console.print()
        self.console.rule(Text(f"{prompt.domain} ({place})" if prompt.domain else place), align="left")
        self.console.print(Text(prompt.turns[0], style="bold"))

    def start(self, title: str) -> None:
        self.console.print()
        self.console.print(Text(title, style="cyan"))

    def increment(self, text: str, *, accepted: bool) -> None:
        if not text:
            return
        shown = Text(text, style=ACCEPTED_STYLE if accepted else "")
        if accepted and not self._styled:
            shown = Text(f"«{text}»")
        self.console.print(shown, end="", soft_wrap=True)

    def end(self, result: GenerationResult) -> None:
        rate = tokens_per_second([result])
        line = f"{len(result.token_ids)} tokens in {result.seconds:.2f} s = {rate:.1f} tokens/s"
        if result.drafted:
            line += f", {result.rounds} rounds, accepted length {result.accepted_length:.2f}"
        self.console.print()
        self.console.print(Text(line, style="dim"))

    def report(self, report: Report) -> None:
        self.console.print()
        self.console.print(_speed_table(report))
        self.console.print()
        self.console.print(_position_table(report))
        self.console.print()
        self.console.print(_verdict(report))


def _speed_table(report: Report) -> Table:
    table = Table(title="Target alone and with DSpark", title_justify="left")
    table.add_column("prompt")
    for column in ("tokens", "alone tok/s", "DSpark tok/s", "speed-up", "accepted length", "identical"):
        table.add_column(column, justify="right")
    for number, comparison in enumerate(report.comparisons, start=1):
        plain, speculative = tokens_per_second([comparison.plain]), tokens_per_second([comparison.speculative])
        table.add_row(
            f"{number} {comparison.prompt.domain}".rstrip(),
            str(len(comparison.speculative.token_ids)),
            f"{plain:.1f}",
            f"{speculative:.1f}",
            f"{speculative / plain:.2f}x",
            f"{comparison.speculative.accepted_length:.2f}",
            "-" if not report.repeatable else "yes" if comparison.first_difference is None else "NO",
        )
    table.add_section()
    table.add_row(
        "all",
        str(sum(len(comparison.speculative.token_ids) for comparison in report.comparisons)),
        f"{report.plain_tokens_per_second:.1f}",
        f"{report.speculative_tokens_per_second:.1f}",
        f"{report.speed_up:.2f}x",
        f"{report.accepted_length:.2f}",
        "-"
        if not report.repeatable
        else f"{len(report.comparisons) - len(report.differing)}/{len(report.comparisons)}",
        style="bold",
    )
    return table


def _position_table(report: Report) -> Table:
    """Prefix survival and conditional acceptance of each draft position."""
    table = Table(title="Acceptance by position in the draft", title_justify="left")
    table.add_column("draft token")
    accepted = report.accepted_per_position
    for position in range(1, len(accepted) + 1):
        table.add_column(str(position), justify="right")
    table.add_row("rounds that verified it", *map(str, report.verified_per_position))
    table.add_row("accepted, of those", *map(_share, accepted, report.verified_per_position))
    table.add_row("accepted, once the ones before were", *map(_share, accepted, report.reached_per_position))
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _verdict(report: Report) -> Text:
    count = len(report.comparisons)
    if not report.repeatable:
        return Text(
            "Outputs were not compared: without a seed, two samples of one distribution differ. Use --seed to compare."
        )
    if not report.differing:
        return Text(f"Both outputs were identical, token for token, for all {count} prompts.", style="bold green")
    places = ", ".join(
        f"prompt {index + 1} from token {report.comparisons[index].first_difference}" for index in report.differing
    )
    return Text(
        f"Outputs DIFFER for {len(report.differing)} of {count} prompts: {places}."
        " Rounding can swap two almost equally likely tokens, in bfloat16 above all; anything else is a bug.",
        style="bold red",
    )

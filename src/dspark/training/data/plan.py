"""The plan of a run: which rows there will be, and the randomness that belongs to each.

Both depend on the settings alone, so that a run that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.training.data.prompts import PromptSource


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """A row to make: ``prompt_number`` is the line of a file source, and a mere count for self-prompting."""

    id: str
    source: PromptSource
    prompt_number: int


def plan_rows(sources: Sequence[PromptSource], *, rows: int, seed: int) -> list[PlannedRow]:
    """The first ``rows`` rows of the sources, mixed evenly by their shares.

    A longer plan begins with the shorter one. A file source gives its prompts in an order drawn from ``seed``, each
    once; when only files are left and all are used up, the plan ends early. Row ids are ``<source>/<number>``.
    """
    if not sources:
        raise ValueError("sources is empty; give at least one, for example self")
    orders: dict[str, list[int]] = {}
    for source in sources:
        if source.size is not None:
            order = list(range(source.size))
            random.Random(derived_seed(seed, source.name, "order")).shuffle(order)
            orders[source.name] = order
    planned = {source.name: 0 for source in sources}
    left = list(sources)
    plan: list[PlannedRow] = []
    while len(plan) < rows and left:
        # The source whose next row is due first when each gives its rows at a steady pace.
        source = min(left, key=lambda candidate: (planned[candidate.name] + 1) / candidate.share)
        number = planned[source.name]
        if source.size is not None:
            number = orders[source.name][number]
        plan.append(PlannedRow(id=f"{source.name}/{number:06d}", source=source, prompt_number=number))
        planned[source.name] += 1
        left = [candidate for candidate in left if candidate.size is None or planned[candidate.name] < candidate.size]
    return plan


def derived_seed(seed: int, row_id: str, purpose: str) -> int:
    """A seed in [0, 2**53) that is a function of its arguments and unrelated between any two of them."""
    digest = hashlib.sha256(f"{seed}\0{row_id}\0{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def derived_fraction(seed: int, row_id: str, purpose: str) -> float:
    """A number in [0, 1) that is a function of its arguments and unrelated between any two of them."""
    return derived_seed(seed, row_id, purpose) / 2.0**53

"""The few nouns that every package shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request inside a flattened batch.

    The tokens stand next to each other in the flat token axis and sit at positions
    ``start .. start + length - 1`` of key/value slot ``slot``.
    """

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position after the last token, i.e. the slot's length once the segment is written."""
        return self.start + self.length

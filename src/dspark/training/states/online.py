"""Teacher states without a disk: the target computes them whenever they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.models.target import Target
from dspark.training.data.rows import DataRow
from dspark.training.states.compute import RowTokens, compute_states, length_batches
from dspark.training.states.spec import RowStates, StoredRow, StoreSpec, stored_row

__all__ = ["OnlineStates"]


class OnlineStates:
    """States of ``rows``, computed by ``target`` on every read; nothing is kept.

    The same numbers as a store of the same spec holds, up to the order of summation in the target's pass.
    """

    def __init__(
        self, target: Target, rows: Sequence[DataRow], spec: StoreSpec, *, tokens_per_batch: int = 2048
    ) -> None:
        """Take the rows that have something to predict.

        Args:
            target: in the same process as the drafter.
            rows: the data set. Rows without two response tokens in a span (after the cut at ``max_length``) are left
                out.
            spec: of the states (``store_spec``).
            tokens_per_batch: most tokens of one target pass.

        Raises:
            ValueError: the spec is of another target, or a row id occurs twice.
        """
        if spec.target_fingerprint != target.fingerprint:
            raise ValueError("spec is of another target: make it with store_spec(target, ...)")
        self.spec = spec
        self._target = target
        self._tokens_per_batch = tokens_per_batch
        self._rows: dict[str, StoredRow] = {}
        self._token_ids: dict[str, tuple[int, ...]] = {}
        for row in rows:
            stored = stored_row(row, spec)
            if stored.id in self._rows:
                raise ValueError(f"row id {stored.id} occurs twice: give row ids that are unique and stable")
            if stored.predictions:
                self._rows[stored.id] = stored
                self._token_ids[stored.id] = row.token_ids

    @property
    def rows(self) -> tuple[StoredRow, ...]:
        """All rows, in the order of the data set."""
        return tuple(self._rows.values())

    def read(self, rows: Sequence[StoredRow], ends: Sequence[int] | None = None) -> list[RowStates]:
        """States of ``rows``, in their order (:class:`StateSource`); no token at or beyond ``ends`` is computed.

        Raises:
            ValueError: a token id is outside the target's vocabulary, or the target gives NaN or infinity.
        """
        if ends is None:
            ends = [row.length for row in rows]
        wanted = [
            RowTokens(row=row, token_ids=self._token_ids[row.id], end=min(end, row.length))
            for row, end in zip(rows, ends, strict=True)
        ]
        states: dict[tuple[str, int], RowStates] = {}
        for batch in length_batches(wanted, self._tokens_per_batch):
            for item, row_states in zip(batch, compute_states(self._target, batch, self.spec), strict=True):
                states[item.row.id, item.end] = row_states
        return [states[item.row.id, item.end] for item in wanted]

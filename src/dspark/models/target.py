"""What the rest of the system may ask of a target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dspark.models.block_tables import BlockTables
from dspark.types import Segment

_ID_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Hidden states of one forward pass over ``N`` flattened tokens.

    Attributes:
        hidden_NH: states after the final norm, the input of the LM head.
        taps_NT: outputs of the asked decoder layers side by side, ``T = len(tap_layers) * H``;
            None when no layer was asked for.
        logits_MV: float32 logits after the asked rows, in their order; None when none was asked for.
        best_M: int64 on the CPU, the id of the largest of each of these rows, of equal ones the first; None from a
            target that leaves that to others.
    """

    hidden_NH: torch.Tensor
    taps_NT: torch.Tensor | None
    logits_MV: torch.Tensor | None
    best_M: torch.Tensor | None = None


class TargetConfig(Protocol):
    """Sizes of a target. A drafter takes those that its recipe does not set from here."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of prompt and answer that fit together."""
        ...

    @property
    def final_softcap(self) -> float | None:
        """``cap`` of ``cap * tanh(logits / cap)``; None for none."""
        ...


class TargetCache(Protocol):
    """Key/value memory of a target in slots, one request each. Only the target that made it can use it."""

    @property
    def num_slots(self) -> int: ...

    @property
    def lengths(self) -> list[int]:
        """Valid positions of each slot."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget every position of ``slot`` from ``length`` on; ValueError if it holds fewer."""
        ...

    def adopt(self, slot: int, length: int) -> None:
        """Count positions ``0 .. length - 1`` as valid: blocks with them were assigned to ``slot``.

        Raises:
            ValueError: if there are not so many in the slot's blocks, or the target shares no blocks.
        """
        ...


class Target(Protocol):
    """A frozen causal language model with a key/value cache in slots.

    Its logits are ``softcap(hidden_NH @ lm_head_weight_VH.T + lm_head_bias_V)``, softcap as in
    ``config.final_softcap``.
    """

    @property
    def config(self) -> TargetConfig: ...

    @property
    def fingerprint(self) -> str:
        """Hash that differs between checkpoints, whatever they are computed in."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the hidden states."""
        ...

    @property
    def compute_dtype(self) -> str:
        """What it computes in: ``float32``, ``bfloat16`` or ``int8``."""
        ...

    @property
    def embedding_weight_VH(self) -> torch.Tensor:
        """Token embeddings, before any input scaling."""
        ...

    @property
    def lm_head_weight_VH(self) -> torch.Tensor:
        """Output head in floating point, whatever the compute type."""
        ...

    @property
    def lm_head_bias_V(self) -> torch.Tensor | None:
        """Bias of the output head; None for none."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether `new_cache` takes tables."""
        ...

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> TargetCache:
        """Allocate key/value memory for ``num_slots`` requests of up to ``max_length`` tokens each.

        Args:
            tables: which blocks hold the positions of each slot, where the caller decides it; by default every slot
                has room for ``max_length``.

        Raises:
            ValueError: if the tables do not fit these sizes, or the target cannot go by them (`shares_blocks`).
        """
        ...

    def forward(
        self,
        token_ids_N: torch.Tensor,
        segments: Sequence[Segment],
        cache: TargetCache,
        tap_layers: Sequence[int] = (),
        logit_rows: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass over the tokens of all segments, in the order of ``segments``.

        Keys and values are written at each segment's positions; a segment attends to its slot's positions before it
        and causally to itself.

        Args:
            tap_layers: decoder layers whose outputs are wanted.
            logit_rows: flat tokens, 0 to ``N - 1``, whose `logits` are wanted.

        Raises:
            ValueError: if there are no tokens or ids are not whole numbers in one dimension, if the segments do not add
                up to them, do not continue their slots or do not fit, or a tap layer or a row does not exist.
            IndexError: if an id is outside the vocabulary. Nothing is written or counted in all these cases.
        """
        ...

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """LM head on the asked rows only: ``[M, V]`` in float32."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings ``[..., H]`` as the model itself feeds them to its first layer."""
        ...


def check_pass(
    token_ids_N: torch.Tensor,
    segments: Sequence[Segment],
    tap_layers: Sequence[int],
    logit_rows: Sequence[int],
    num_layers: int,
) -> None:
    """Raise ValueError unless ``segments`` hold exactly these tokens, and every tap layer and row exists.

    Whether ids are in the vocabulary is left to those who look them up, before they count positions.
    """
    if token_ids_N.ndim != 1 or token_ids_N.dtype not in _ID_DTYPES:
        raise ValueError(
            f"token_ids_N takes whole numbers in one dimension, not {token_ids_N.dtype} {tuple(token_ids_N.shape)}"
        )
    if len(token_ids_N) == 0:
        raise ValueError("a pass needs at least one token")
    if (tokens := sum(segment.length for segment in segments)) != len(token_ids_N):
        raise ValueError(f"segments hold {tokens} tokens, token_ids {len(token_ids_N)}")
    if missing := [layer for layer in tap_layers if not 0 <= layer < num_layers]:
        raise ValueError(f"tap layers {missing} do not exist: the target has layers 0 to {num_layers - 1}")
    rows = np.asarray(logit_rows)
    are_rows = rows.ndim == 1 and rows.dtype.kind in "iu" and 0 <= rows.min() <= rows.max() < tokens
    if len(logit_rows) and not are_rows:
        raise ValueError(f"logit_rows {list(logit_rows)} are not all among the pass's tokens, 0 to {tokens - 1}")

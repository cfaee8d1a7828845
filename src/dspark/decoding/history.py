"""The tokens a request has seen, as far as penalties need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class TokenHistory:
    """Which tokens are in the prompt, and how often each was generated.

    The repetition penalty looks at prompt and output, presence and frequency at the output only.
    ``fork``, ``after`` and ``after_each`` give independent copies, for the trial tokens of a block; they share the
    prompt.
    """

    __slots__ = ("_counts", "_prompt_ids_P")

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        """Start with the given prompt and an empty output."""
        self._prompt_ids_P = torch.tensor(sorted(set(prompt_ids)), dtype=torch.long)
        self._counts: dict[int, int] = {}

    def append(self, token: int) -> None:
        """Record one generated token."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def extend(self, tokens: Iterable[int]) -> None:
        """Record generated tokens, in any order: only how often each occurs matters."""
        for token in tokens:
            self.append(token)

    def fork(self) -> TokenHistory:
        """An independent copy; later changes of either do not show in the other."""
        copy = TokenHistory.__new__(TokenHistory)
        copy._prompt_ids_P = self._prompt_ids_P  # never written to
        copy._counts = self._counts.copy()
        return copy

    def after(self, trial_tokens: Iterable[int]) -> TokenHistory:
        """The history after all of a block's trial tokens."""
        history = self.fork()
        history.extend(trial_tokens)
        return history

    def after_each(self, trial_tokens: Iterable[int]) -> list[TokenHistory]:
        """The histories of a block's rows: this one, then after x_1, after x_1 x_2, ... (one more than the tokens)."""
        rows = [self.fork()]
        for token in trial_tokens:
            row = rows[-1].fork()
            row.append(token)
            rows.append(row)
        return rows

    @property
    def counts(self) -> Mapping[int, int]:
        """Generated token id -> how often it was generated (a view: do not change it)."""
        return self._counts

    def seen_ids(self) -> Tensor:
        """Ids in prompt or output, int64 [S], on the CPU; a token that is in both stands twice."""
        return torch.cat((self._prompt_ids_P, torch.tensor(list(self._counts), dtype=torch.long)))

    def generated_ids(self) -> Tensor:
        """Distinct ids of the output, int64 [G], on the CPU, aligned with ``generated_counts``."""
        return torch.tensor(list(self._counts), dtype=torch.long)

    def generated_counts(self) -> Tensor:
        """How often each of ``generated_ids`` was generated, int64 [G], on the CPU."""
        return torch.tensor(list(self._counts.values()), dtype=torch.long)

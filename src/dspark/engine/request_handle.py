"""A request while the engine has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dspark.engine.choice import Choice
from dspark.engine.request import Delta, Request, RequestResult

__all__ = ["RequestHandle"]


@dataclass(kw_only=True, eq=False)
class RequestHandle:
    """A request in the engine.

    Attributes:
        choices: the first one alone until its prompt can be shared (`is_forked`): they take memory, however long they
            wait.
        first_choice_id: ids of all choices follow on one another.
        result: None until it is finished.
        error: of its own, which has ended it without a result.
    """

    request_id: int
    request: Request
    first_choice_id: int
    choices: list[Choice]
    num_open: int  # choices that are not finished
    submitted_at: float
    on_delta: Callable[[Delta], None] | None
    on_result: Callable[[RequestResult], None] | None
    on_error: Callable[[Exception], None] | None
    result: RequestResult | None = None
    error: Exception | None = None
    reused_tokens: int | None = None
    started_at: float | None = None
    first_token_at: float | None = None

    @property
    def is_forked(self) -> bool:
        """Whether all choices are there."""
        return len(self.choices) == self.request.n

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended, or an error has ended it."""
        return self.result is not None or self.error is not None

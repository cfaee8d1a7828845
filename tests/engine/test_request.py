"""What a request may be: everything else is refused where it is made, before it can reach those that run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dspark.engine.request import Request
from dspark.engine.settings import EngineSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_ids", ()),
        ("prompt_ids", (1.0, 2.0)),
        ("prompt_ids", "12"),
        ("prompt_ids", None),
        ("prompt_ids", 3),
        ("sampling", {"temperature": 1.0}),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", math.nan),
        ("max_tokens", True),
        ("max_tokens", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", frozenset({"5"})),
        ("stop_strings", "end"),
        ("stop_strings", ("",)),
        ("stop_strings", (7,)),
        ("n", 0),
        ("n", 1.0),
        ("logprobs", -1),
        ("logprobs", 1.5),
        ("max_draft_tokens", -1),
        ("max_draft_tokens", math.nan),
        ("user", None),
        ("user", ["a"]),
        ("prefix_namespace", ["a"]),
        ("random", 0.5),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        Request(**{"prompt_ids": (1,), field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt_ids", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])])
def test_token_ids_may_come_in_any_sequence_of_whole_numbers(prompt_ids: object) -> None:
    request = Request(prompt_ids=prompt_ids)  # type: ignore[arg-type]
    assert request.prompt_ids == (1, 2)
    assert all(type(token) is int for token in request.prompt_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_concurrency", 0),
        ("max_concurrency", 2.0),
        ("max_concurrency", math.nan),
        ("max_prefill_tokens", None),
        ("max_prefill_tokens", 0),
        ("max_waiting", math.inf),
        ("max_length", 1),
        ("max_length", 20.5),
        ("kv_memory_bytes", -1),
        ("kv_memory_bytes", 1e9),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        EngineSettings(**{field: value})  # type: ignore[arg-type]

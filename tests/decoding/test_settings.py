from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from dspark.decoding import SamplingSettings


def test_defaults_are_greedy_and_need_no_history() -> None:
    settings = SamplingSettings()
    assert settings.is_greedy
    assert not settings.needs_history
    assert settings == replace(settings)
    assert hash(settings) == hash(SamplingSettings(logit_bias={}))


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_need_history(name: str) -> None:
    assert SamplingSettings(**{name: 0.5}).needs_history


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 1e-9), ("temperature", math.inf), ("temperature", math.nan),
        ("temperature", True), ("temperature", "1"),
        ("top_k", 0), ("top_k", -1), ("top_k", 1.5), ("top_k", True),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("top_p", None),
        ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 2.1), ("frequency_penalty", -2.1),
        ("seed", 2**63), ("seed", 1.0), ("seed", True),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf}),
    ],
)  # fmt: skip
def test_out_of_range_names_the_field(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name}.* must be "):
        SamplingSettings(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-5}, {"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1}, {"min_p": 1}, {"min_p": 0},
        {"presence_penalty": -2}, {"frequency_penalty": 2}, {"seed": -(2**63)}, {"seed": 0},
        {"logit_bias": {0: -math.inf}},
    ],
)  # fmt: skip
def test_ends_of_the_ranges_are_allowed(fields: dict[str, object]) -> None:
    SamplingSettings(**fields)


def test_frozen_keyword_only_and_independent_of_the_callers_mapping() -> None:
    bias = {1: 2.0}
    settings = SamplingSettings(logit_bias=bias)
    bias[1] = 3.0
    assert settings.logit_bias == {1: 2.0}
    with pytest.raises(FrozenInstanceError):
        settings.temperature = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingSettings(1.0)  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert SamplingSettings(**asdict(settings)) == settings

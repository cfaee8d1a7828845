from __future__ import annotations

import pytest

from dspark.models.loading import LoadedTarget
from dspark.training.data.rows import DataRow
from dspark.training.states import StoreSpec, store_spec
from tests.training.tiny import greedy_rows, tiny_target


@pytest.fixture(scope="session")
def target() -> LoadedTarget:
    return tiny_target()


@pytest.fixture(scope="session")
def rows(target: LoadedTarget) -> list[DataRow]:
    return greedy_rows(target, rows=6)


@pytest.fixture(scope="session")
def spec(target: LoadedTarget) -> StoreSpec:
    return store_spec(target.model, tap_layers=(0, 2), max_length=100, target_dtype="float32")

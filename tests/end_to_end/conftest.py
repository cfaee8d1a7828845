"""The embedded target and the drafter that ships for it, loaded once a process."""

from __future__ import annotations

import pytest

from dspark.cli.models import Models, open_models


@pytest.fixture(scope="session")
def embedded_int8() -> Models:
    return open_models(target="embedded", drafter=None, speculation=True, dtype="int8", device="cpu")


@pytest.fixture(scope="session")
def embedded_float32() -> Models:
    return open_models(target="embedded", drafter=None, speculation=True, dtype="float32", device="cpu")

"""Requests made up from the OpenAPI document: none of them, right or wrong, is answered with what it does not say."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import one_of
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dspark.server.app import loading_app
from dspark.server.settings import ServerSettings
from tests.server.small import make_app

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def openapi():
    """The document of a server with short answers."""
    app, engine, _ = make_app(max_length=48)
    with engine:
        yield schemathesis.openapi.from_asgi("/openapi.json", app)
        assert engine.is_alive
        statistics = engine.statistics()
        assert statistics.running == statistics.waiting == statistics.memory.num_used_blocks == 0
        assert app.state.lifecycle.num_open == 0


def operations() -> list[tuple[str, str]]:
    """All of the server's, by path and method."""
    paths = loading_app(ServerSettings()).openapi()["paths"]
    return [(path, method) for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize(("path", "method"), operations())
def test_every_answer_is_one_that_the_document_knows(openapi, path, method):
    operation = openapi[path][method]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]

    @settings(
        max_examples=40,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    check()

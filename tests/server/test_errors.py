"""Every error comes in OpenAI's envelope, says which parameter is to blame, and tells nothing of the inside."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from dspark.engine.queue import QueueFull
from dspark.engine.submitted import EngineError
from dspark.server.errors import ApiError, add_error_handlers

JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


def error_of(client: TestClient, content: bytes, headers: dict[str, str] = JSON) -> dict[str, Any]:
    response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    (name,) = response.json()
    assert name == "error"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b'{"prompt": ', "not valid JSON", "invalid_json"),
        (b'{"prompt": "\xff"}', "send JSON in UTF-8", "invalid_json"),
        (b"[" * 100_000, "send JSON in UTF-8", "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", "send JSON in UTF-8", "invalid_json"),
        (b"[1]", "must be a JSON object", "invalid_value"),
        (b"3", "must be a JSON object", "invalid_value"),
        (b"", "no body", "missing_required_parameter"),
    ],
)
def test_a_body_that_is_no_json(client: TestClient, content: bytes, message: str, code: str) -> None:
    error = error_of(client, content)
    assert message in error["message"]
    assert error["param"] is None
    assert error["code"] == code


def test_json_has_to_say_that_it_is(client: TestClient) -> None:
    assert "application/json" in error_of(client, b'{"prompt": "a"}', {"content-type": "text/plain"})["message"]


@pytest.mark.parametrize("text", [b'"\\ud800"', b'["a", "x\\udfff"]'])
def test_half_a_surrogate_pair_is_no_text(client: TestClient, text: bytes) -> None:
    error = error_of(client, b'{"prompt": ' + text + b"}")
    assert error["param"] == "prompt"
    assert "surrogate" in error["message"]


def test_an_unknown_name_that_is_no_text_is_answered(client: TestClient) -> None:
    error_of(client, b'{"prompt": "a", "\\ud800": 1}')


def test_unknown_and_missing_parameters_are_named(client: TestClient) -> None:
    error = error_of(client, b'{"prompt": "a", "temprature": 1}')
    assert error["message"] == "unknown parameter: temprature"
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    error = error_of(client, b"{}")
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


def test_all_problems_are_told_up_to_five(client: TestClient) -> None:
    error = error_of(client, b'{"prompt": "a", "n": 0, "top_p": 0, "x": 1, "y": 1, "z": 1, "w": 1, "v": 1}')
    assert error["param"] == "n"
    assert error["message"].startswith("n: ")
    assert "top_p: " in error["message"]
    assert error["message"].endswith("and 2 more")


def test_a_long_name_is_cut(client: TestClient) -> None:
    error = error_of(client, b'{"prompt": "a", "' + b"x" * 100_000 + b'": 1}')
    assert len(error["message"]) == len(error["param"]) == 1000


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_numbers_that_are_none(client: TestClient, name: str, value: bytes) -> None:
    assert error_of(client, b'{"prompt": "a", "' + name.encode() + b'": ' + value + b"}")["param"] == name


def test_paths_and_methods_that_are_not_there(client: TestClient) -> None:
    for response, status in ((client.get("/nothing"), 404), (client.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def raised(error: Exception) -> tuple[int, dict[str, Any], Any]:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    async def fail() -> None:
        raise error

    response = TestClient(app, raise_server_exceptions=False).get("/")
    return response.status_code, response.json()["error"], response.headers


def test_an_own_error_is_told_as_it_is() -> None:
    status, error, headers = raised(ApiError(418, "no coffee", "cup", "teapot", {"x-pot": "tea"}))
    assert status == 418
    assert error == {"message": "no coffee", "type": "invalid_request_error", "param": "cup", "code": "teapot"}
    assert headers["x-pot"] == "tea"


def test_a_full_queue_says_when_to_come_again() -> None:
    status, error, headers = raised(QueueFull("7 wait"))
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("error", [EngineError("secret"), RuntimeError("secret"), ValueError("secret")])
def test_nothing_of_the_inside_is_told(error: Exception) -> None:
    status, told, _ = raised(error)
    assert (status, told["type"], told["code"]) == (500, "server_error", "internal_error")
    assert "secret" not in str(told)

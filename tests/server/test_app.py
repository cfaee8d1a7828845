"""What the server says of itself, and what every answer has."""

from __future__ import annotations

import logging

import pytest
from fastapi.testclient import TestClient

from dspark import __version__
from dspark.server.app import loading_app
from dspark.server.settings import ServerSettings
from tests.server.small import CONTEXT, make_app, wait_until


def completion(client: TestClient, **more: object):
    return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, **more})


def test_a_ready_server_is_healthy_and_says_what_it_is(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": __version__}


def test_the_model_is_listed_and_found_by_name(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "bytes"
    assert model["object"] == "model"
    assert model["owned_by"] == "dspark"
    assert model["max_model_len"] == CONTEXT
    assert model["created"] > 1.7e9
    assert client.get("/v1/models/bytes").json() == model
    other = client.get("/v1/models/someone/else")
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "model_not_found"
    assert "bytes" in other.json()["error"]["message"]


def test_a_model_goes_by_the_name_it_is_given():
    app, engine, _ = make_app(settings=ServerSettings(model_name="team/model"))
    with engine, TestClient(app) as client:
        assert client.get("/v1/models/team/model").json()["id"] == "team/model"
        assert 'model_name="team/model"' in client.get("/metrics").text


def test_while_models_load_everything_else_waits():
    with TestClient(loading_app(ServerSettings())) as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert "loading" in health.json()["error"]["message"]
        assert client.get("/version").status_code == 200
        assert client.get("/metrics").status_code == 503
        for answer in (client.get("/v1/models"), completion(client)):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0


def test_a_server_that_drains_takes_nothing_new():
    app, engine, _ = make_app()
    with engine, TestClient(app) as client:
        assert completion(client).status_code == 200
        app.state.lifecycle.drain()
        answer = completion(client)
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        assert client.get("/health").status_code == 503
        assert client.get("/metrics").status_code == 200  # the last numbers are still worth having


def test_health_tells_of_an_engine_that_has_ended():
    app, engine, model = make_app()
    with engine, TestClient(app, raise_server_exceptions=False) as client:
        model.failures = 2
        for _ in range(2):
            assert completion(client).status_code == 500
        assert client.get("/health").status_code == 200  # it goes on after an error
        assert completion(client).status_code == 200
        model.failures = 3  # and gives up after three in a row
        answers = [completion(client) for _ in range(3)]
        assert all("no memory left" not in answer.text for answer in answers)
        wait_until(lambda: not engine.is_alive)
        health = client.get("/health")
        assert health.status_code == 503
        assert "engine" in health.json()["error"]["message"]
        assert completion(client).status_code == 503
        assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize("given", ["abc-123", "A.b:c_d", "x" * 128])
def test_a_request_keeps_its_id(client, given):
    assert client.get("/health", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "id;drop", "é".encode()])
def test_an_id_that_could_not_be_logged_is_replaced(client, given):
    answer = client.get("/nowhere", headers={"x-request-id": given})
    assert answer.status_code == 404
    assert answer.headers["x-request-id"].startswith("req-")


def test_requests_have_different_ids(client):
    assert len({client.get("/version").headers["x-request-id"] for _ in range(5)}) == 5


def test_the_log_has_a_line_a_request_and_nothing_of_its_content(client, caplog):
    with caplog.at_level(logging.INFO, logger="dspark.server"):
        completion(client, prompt="my secret", user="carol")
        client.get("/v1/models/%0Aforged%1b[2J?query=secret")
    lines = [record.getMessage() for record in caplog.records if record.name == "dspark.server"]
    assert len(lines) == 2
    assert " POST /v1/completions 200 " in lines[0]
    assert " 404 " in lines[1]
    for line in lines:
        assert line.isprintable()
        assert "secret" not in line
        assert "carol" not in line


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PUT", "/v1/models", 405)])
def test_a_wrong_address_is_an_error_of_the_usual_form(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_error_of_ours_tells_nothing_of_the_inside():
    app, engine, _ = make_app()

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("/etc/passwd")

    with engine, TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/broken")
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "passwd" not in answer.text
        assert answer.headers["x-request-id"].startswith("req-")


def test_pages_of_other_sites_cannot_read_answers(client):
    answer = client.get("/v1/models", headers={"origin": "https://elsewhere.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert client.options("/v1/completions", headers={"origin": "https://elsewhere.example"}).status_code == 405


def test_the_openapi_document_says_what_needs_a_key():
    document = loading_app(ServerSettings(api_keys=("secret",))).openapi()
    assert document["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    assert document["paths"]["/v1/chat/completions"]["post"]["security"] == [{"api_key": []}]
    open_paths = {path for path, operations in document["paths"].items() if "security" not in str(operations)}
    assert open_paths == {"/health", "/version", "/metrics"}
    assert "securitySchemes" not in loading_app(ServerSettings()).openapi()["components"]


def test_the_openapi_document_names_every_route(client):
    paths = client.get("/openapi.json").json()["paths"]
    wanted = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/version", "/tokenize"}
    assert wanted <= set(paths)


def test_the_document_explains_what_openai_does_not_have() -> None:
    properties = loading_app(ServerSettings()).openapi()["components"]["schemas"]["ChatRequest"]["properties"]
    for name in ("ignore_eos", "min_tokens", "stop_token_ids", "user", "model"):
        assert properties[name]["description"].endswith("."), name

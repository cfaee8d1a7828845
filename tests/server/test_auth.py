"""Who is served, and what one key's requests may know of another's."""

from __future__ import annotations

from hashlib import sha256

import pytest
from fastapi.testclient import TestClient

from dspark.engine.grammar import GrammarCompiler
from dspark.server import middleware
from dspark.server.settings import ServerSettings
from tests.server.small import make_app

KEYS = ("first-key", "second-key", "third-key")


@pytest.fixture(scope="module")
def guarded():
    app, engine, _ = make_app(settings=ServerSettings(api_keys=KEYS))
    with engine, TestClient(app) as client:
        yield client


def bearer(key: str | bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + (key if isinstance(key, bytes) else key.encode())}


@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("first-ke"),
        bearer("first-key2"),
        bearer("first-key second-key"),
        bearer("FIRST-KEY"),
        bearer(b"\xff\xfe"),
        {b"authorization": b"first-key"},
        {b"authorization": b"Basic first-key"},
    ],
    ids=str,
)
def test_without_a_key_nothing_is_told(guarded, path, headers):
    answer = guarded.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert not any(key in answer.text for key in KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded, key):
    assert guarded.get("/v1/models", headers=bearer(key)).status_code == 200
    assert guarded.get("/v1/models", headers={b"Authorization": b"bearer   " + key.encode()}).status_code == 200


def test_a_body_without_a_key_is_not_read(guarded):
    assert guarded.post("/v1/completions", content=b"{").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
def test_what_watches_the_server_needs_no_key(guarded, path):
    assert guarded.get(path).status_code == 200


def test_every_key_is_compared_wherever_the_right_one_stands(guarded, monkeypatch):
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return left == right

    monkeypatch.setattr(middleware, "compare_digest", compare)
    assert guarded.get("/v1/models", headers=bearer(KEYS[0])).status_code == 200
    assert compared == [sha256(key.encode()).digest() for key in KEYS]  # of one length, whatever the keys are


@pytest.mark.parametrize("separate", [False, True])
def test_prompts_are_reused_across_keys_unless_keys_are_separated(separate):
    app, engine, _ = make_app(settings=ServerSettings(api_keys=KEYS, separate_keys=separate))

    def cached_tokens(client: TestClient, key: str) -> int:
        body = {"prompt": "all of this was computed before " * 4, "max_tokens": 1, "temperature": 0}
        answer = client.post("/v1/completions", json=body, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    with engine, TestClient(app) as client:
        assert cached_tokens(client, KEYS[0]) == 0
        assert cached_tokens(client, KEYS[0]) > 0
        assert (cached_tokens(client, KEYS[1]) > 0) is not separate


@pytest.mark.parametrize("separate", [False, True])
def test_grammars_are_not_compiled_twice_unless_keys_are_separated(separate, monkeypatch):
    app, engine, _ = make_app(settings=ServerSettings(api_keys=KEYS, separate_keys=separate))
    compiled, compile_one = [], GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda self, source: compiled.append(source) or compile_one(self, source)
    )
    with engine, TestClient(app) as client:
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            for pattern, status in (("[ab]+", 200), ("(a", 400)):
                body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": pattern}}
                assert client.post("/v1/completions", json=body, headers=bearer(key)).status_code == status
    assert len(compiled) == (4 if separate else 2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"separate_keys": True}, "separate_keys"),
        ({"api_keys": ("",)}, "api_keys"),
        ({"api_keys": ("a b",)}, "api_keys"),
        ({"api_keys": ("ключ",)}, "api_keys"),
        ({"port": 65536}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"drain_seconds": float("nan")}, "drain_seconds"),
        ({"model_name": " "}, "model_name"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        ServerSettings(**settings)


def test_settings_do_not_show_keys():
    assert "first-key" not in repr(ServerSettings(api_keys=KEYS))

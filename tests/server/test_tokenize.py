"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.byte_tokenizer import END, VOCABULARY_SIZE
from tests.server.small import CONTEXT


def test_a_text(client: TestClient) -> None:
    response = client.post("/tokenize", json={"prompt": "hé", "model": "bytes"})
    assert response.json() == {
        "count": 3,
        "max_model_len": CONTEXT,
        "tokens": list("hé".encode()),
        "token_strs": None,
    }


def test_tokens_as_text(client: TestClient) -> None:
    response = client.post("/tokenize", json={"prompt": "hé<end>", "return_token_strs": True})
    assert response.json()["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<end>"]


def test_a_conversation(client: TestClient) -> None:
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    response = client.post("/tokenize", json={"messages": messages})
    assert response.json()["tokens"] == list(b"<s>be<u>hi<a>")


def test_there_and_back(client: TestClient) -> None:
    text = "Grüße, 世界 🙂<end>"
    tokens = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert tokens[-1] == END
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCABULARY_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_what_is_refused(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_model_is_not_found(client: TestClient, path: str, body: dict[str, Any]) -> None:
    assert client.post(path, json={**body, "model": "x"}).status_code == 404

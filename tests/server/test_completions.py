"""POST /v1/completions without streams."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.byte_tokenizer import END, VOCABULARY_SIZE
from tests.server.small import CONTEXT, ByteTarget


def post(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": "once", "max_tokens": 6, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def texts(client: TestClient, **body: Any) -> list[str]:
    return [choice["text"] for choice in post(client, **body)["choices"]]


def own_logprobs(tokens: list[int]) -> list[float]:
    """Of each token but the first, from the table."""
    log_SV = ByteTarget().table_SV.log()
    return [float(log_SV[sum(tokens[:at]) % len(log_SV), token]) for at, token in enumerate(tokens) if at > 0]


def test_the_whole_response(client: TestClient) -> None:
    answer = post(client)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer.pop("system_fingerprint").startswith("fp_")
    (text,) = texts(client)
    assert answer == {
        "object": "text_completion",
        "model": "bytes",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 6,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_sixteen_tokens_by_default(client: TestClient) -> None:
    assert post(client, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_prompts_of_every_kind(client: TestClient) -> None:
    one, other = texts(client, prompt="once"), texts(client, prompt="twice")
    assert one != other
    assert texts(client, prompt=list(b"once")) == one
    assert texts(client, prompt=["once"]) == one
    assert texts(client, prompt=["once", "twice"]) == one + other
    assert texts(client, prompt=[list(b"once"), list(b"twice")]) == one + other


def test_choices_of_several_prompts_are_in_order(client: TestClient) -> None:
    answer = post(client, prompt=["once", "twice"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts(client, prompt=["once", "twice"], n=2) == texts(client, n=2) + texts(client, prompt="twice", n=2)
    assert answer["usage"]["prompt_tokens"] == len("oncetwice")
    assert answer["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [VOCABULARY_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "x" * CONTEXT}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 129}, "n"),
        ({"n": 128, "prompt": ["x"] * 9}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "stream": True, "logprobs": 0}, "echo"),
        ({"echo": True, "stream": True, "max_tokens": 0}, "echo"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
def test_what_is_refused_names_the_parameter(client: TestClient, body: dict[str, Any], param: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert param in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"best_of": 1}, {"suffix": None}, {"suffix": ""}, {"echo": False}, {"logprobs": None}]
)
def test_what_asks_for_nothing_changes_nothing(client: TestClient, body: dict[str, Any]) -> None:
    assert texts(client, **body) == texts(client)


def test_another_model_is_not_found(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", "model": "x" * 5000 + "\u00e9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_logprobs(client: TestClient) -> None:
    (choice,) = post(client, logprobs=2, temperature=0, logit_bias={"65": 1000, "66": 999})["choices"]
    logprobs = choice["logprobs"]
    shown = choice["text"].encode()
    assert logprobs["tokens"] == list(choice["text"])
    assert logprobs["text_offset"] == list(range(6))
    assert logprobs["token_logprobs"] == pytest.approx(own_logprobs([*b"once", *shown])[3:], rel=1e-4)
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) in (2, 3)
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_logprobs_of_tokens_alone(client: TestClient) -> None:
    (choice,) = post(client, logprobs=0)["choices"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [token] for token in choice["logprobs"]["tokens"]
    ]


def test_halves_of_characters_and_stop_tokens(client: TestClient) -> None:
    (choice,) = post(client, logprobs=1, structured_outputs={"regex": "aé🙂b"}, max_tokens=20)["choices"]
    assert choice["text"] == "aé🙂b"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["tokens"][-2:] == ["b", "<end>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]


def test_echo(client: TestClient) -> None:
    (text,) = texts(client)
    assert texts(client, echo=True) == ["once" + text]
    assert texts(client, echo=True, prompt=list(b"once")) == ["once" + text]
    assert texts(client, echo=True, prompt=[END, *b"x"])[0].startswith("<end>x")


@pytest.mark.parametrize("prompt", ["once", list(b"once")])
def test_echo_with_the_prompts_log_probabilities(client: TestClient, prompt: Any) -> None:
    (choice,) = post(client, prompt=prompt, echo=True, logprobs=1, temperature=0, logit_bias={"65": 1000})["choices"]
    assert choice["text"] == "onceAAAAAA"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(10))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(own_logprobs(list(b"onceAAAAAA")), rel=1e-4)


def test_special_tokens_of_an_echoed_prompt_have_a_place_if_they_are_shown(client: TestClient) -> None:
    (choice,) = post(client, prompt=[65, END, 66], echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["text"] == "A<end>B"
    assert choice["logprobs"]["text_offset"] == [0, 1, 6]


def test_evaluation_harnesses_ask_for_the_prompt_alone(client: TestClient) -> None:
    answer = post(client, prompt=[list(b"once"), list(b"twice")], echo=True, logprobs=1, max_tokens=0)
    for prompt, choice in zip((b"once", b"twice"), answer["choices"], strict=True):
        assert choice["text"] == prompt.decode()
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own_logprobs(list(prompt)), rel=1e-4)
        assert math.isfinite(sum(choice["logprobs"]["token_logprobs"][1:]))
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 9


def test_whether_a_continuation_is_greedy_can_be_read_off(client: TestClient) -> None:
    greedy = post(client, temperature=0, logprobs=1, max_tokens=4, ignore_eos=True)["choices"][0]["logprobs"]["tokens"]
    tokens = [int(token[8:], 16) if token.startswith("bytes:") else ord(token) for token in greedy]
    for continuation, is_greedy in ((tokens, True), ([*tokens[:3], (tokens[3] + 1) % 256], False)):
        (choice,) = post(client, prompt=[*b"once", *continuation], echo=True, logprobs=1, max_tokens=1)["choices"]
        tops = choice["logprobs"]["top_logprobs"][4:-1]
        shown = choice["logprobs"]["tokens"][4:-1]
        assert all(token == max(top, key=top.get) for token, top in zip(shown, tops, strict=True)) is is_greedy


def test_speculation_is_reported_over_all_prompts(client: TestClient) -> None:
    answer = post(client, prompt=["once", "twice"], return_speculation=True, ignore_eos=True, max_tokens=20)
    assert answer["speculation"]["committed"] == 38
    assert answer["speculation"]["drafted"] > 0


def test_too_many_echoed_log_probabilities_are_refused(client: TestClient) -> None:
    body = {"prompt": [[5] * 200] * 20, "n": 20, "max_tokens": 1, "echo": True, "logprobs": 20}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"
    assert "1680000" in answer.json()["error"]["message"]

"""What /metrics shows is what happened, and the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from dspark.scheduling import Drafts, StepBatch, StepPlan, StepRecord, StepSeconds
from dspark.server.metrics import ServerMetrics
from dspark.server.settings import ServerSettings
from tests.server.small import make_app, make_engine, wait_until

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "dspark.json"
GUIDE = DASHBOARD.parents[1] / "serve.md"
LABELS = {"model_name": "m", "engine": "0"}
VLLM_NAMES = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
}


class Samples:
    """What /metrics says, by name and labels."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self.all = [sample for family in families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.all}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over samples with these labels."""
        found = [s.value for s in self.all if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name} {labels} is not shown"
        return sum(found)


@pytest.fixture
def watched():
    """A server that counts its steps, its engine and the engine's model."""
    app, engine, model = make_app("delayed")
    with engine, TestClient(app, raise_server_exceptions=False) as client:
        try:
            yield client, engine, model
        finally:
            model.gate.set()


def samples(client: TestClient) -> Samples:
    return Samples(client.get("/metrics").text)


def test_requests_steps_and_memory_are_counted(watched):
    client, engine, _ = watched
    prompt = "the same beginning, longer than a block of memory; "
    usages = []
    for request in (
        {"prompt": prompt, "max_tokens": 30, "seed": 1, "temperature": 1.0},
        {"prompt": prompt + "more", "max_tokens": 20, "n": 3, "seed": 2, "temperature": 1.0, "ignore_eos": True},
        {"prompt": [1, 2, 3], "max_tokens": 10, "seed": 3, "temperature": 1.0},
    ):
        answer = client.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        usages.append(answer.json())
    shown, statistics = samples(client), engine.statistics()
    assert shown.names >= VLLM_NAMES
    assert shown("dspark_acceptance_odds_ratio") == pytest.approx(statistics.acceptance_odds_ratio) != 1

    assert shown("vllm:generation_tokens_total") == sum(answer["usage"]["completion_tokens"] for answer in usages)
    assert shown("vllm:prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in usages)
    assert shown("vllm:request_success_total") == 5
    for reason in ("stop", "length"):
        ended = [choice for answer in usages for choice in answer["choices"] if choice["finish_reason"] == reason]
        assert shown("vllm:request_success_total", finished_reason=reason) == len(ended)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert shown(f"vllm:{name}_count") == 3
    assert shown("vllm:request_prompt_tokens_count") == 3
    assert shown("vllm:request_generation_tokens_count") == 5
    assert shown("vllm:request_generation_tokens_sum") == shown("vllm:generation_tokens_total")
    assert shown("vllm:e2e_request_latency_seconds_sum") >= shown("vllm:time_to_first_token_seconds_sum") > 0.0
    assert shown("vllm:inter_token_latency_seconds_count") > 0
    assert shown("vllm:request_max_num_generation_tokens_count") == 3
    queued, prefilling, decoding, inferring, all_of_it = (
        shown(f"vllm:{name}_seconds_sum")
        for name in (
            "request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time",
            "e2e_request_latency",
        )
    )  # fmt: skip
    assert prefilling + decoding == pytest.approx(inferring)
    assert queued + inferring == pytest.approx(all_of_it)

    steps = statistics.steps
    assert shown("vllm:spec_decode_num_draft_tokens_total") == steps.drafted > 0
    assert shown("dspark_verified_tokens_total") == shown("dspark_verified_tokens_per_pos_total") == steps.verified > 0
    assert shown("vllm:spec_decode_num_accepted_tokens_total") == steps.accepted > 0
    assert shown("vllm:spec_decode_num_accepted_tokens_per_pos_total") == steps.accepted
    assert shown("dspark_verify_length_tokens_sum") == steps.verified
    assert shown("dspark_verify_length_tokens_count") == shown("vllm:spec_decode_num_drafts_total")
    assert shown("dspark_steps_total") == shown("dspark_step_seconds_count") == steps.steps
    assert shown("dspark_step_predicted_seconds_total") == pytest.approx(steps.predicted_seconds)
    measured = steps.draft_seconds + steps.schedule_seconds + steps.verify_seconds
    assert shown("dspark_step_measured_seconds_total") == pytest.approx(measured)

    assert shown("vllm:prefix_cache_queries_total") == statistics.memory.prompt_tokens
    assert shown("vllm:prefix_cache_hits_total") == statistics.memory.reused_tokens > 0
    assert shown("vllm:num_requests_running") == shown("vllm:num_requests_waiting") == 0
    assert shown("vllm:kv_cache_usage_perc") == shown("dspark_kv_blocks_used") == 0
    assert shown("dspark_http_responses_total", route="/v1/completions", status="200") == 3


def test_labels_take_no_value_from_clients(watched):
    client, _, _ = watched
    for number in range(5):
        client.get(f"/made/up/{number}")
        client.get(f"/v1/models/made-up-{number}")
        client.post("/v1/completions", json={"prompt": "a", "model": f"made-up-{number}", "user": f"made-up-{number}"})
    text = client.get("/metrics").text
    assert "made" not in text.replace("Drafts made", "")
    assert Samples(text)("dspark_http_responses_total", route="other", status="404") == 5
    for line in text.splitlines():
        assert line.startswith("#") or ('engine="0"' in line and 'model_name="bytes"' in line)


def test_a_scrape_does_not_wait_for_a_long_step(watched):
    client, _, model = watched
    model.gate.clear()
    thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": {"prompt": "abc"}})
    thread.start()
    wait_until(lambda: client.app.state.lifecycle.num_open == 1)
    shown = samples(client)  # would hang
    assert shown("vllm:num_requests_running") in (0, 1)
    assert client.get("/health").status_code == 200
    model.gate.set()
    thread.join()
    wait_until(lambda: samples(client)("vllm:num_requests_running") == 0)


def test_a_lost_request_counts_as_an_error(watched):
    client, _, model = watched
    model.failures = 1
    assert client.post("/v1/completions", json={"prompt": "abc", "n": 2}).status_code == 500
    shown = samples(client)
    assert shown("vllm:request_success_total", finished_reason="error") == 2
    assert shown("vllm:request_success_total") == 2
    assert shown("vllm:num_requests_running") == 0


def test_expected_acceptances_are_the_survivals_of_what_was_verified():
    engine, _ = make_engine()
    engine.close()
    metrics = ServerMetrics(engine, model_name=LABELS["model_name"])
    ids = np.array([4, 5, 6])
    batch = StepBatch(step=0, request_ids_R=ids, draftable_R=np.array([3, 3, 0]), context_tokens=9)
    plan = StepPlan(batch=batch, draft_lengths_R=np.array([3, 2, 0]), why="always")
    confidences = np.array([[0.5, 0.5, 0.5], [0.25, 1.0, 0.0], [0.0, 0.0, 0.0]])
    drafts = Drafts(step=0, request_ids_R=ids, lengths_R=plan.draft_lengths_R, confidences_RG=confidences)
    metrics.on_step(
        StepRecord(
            policy="fixed:3",
            plan=plan,
            drafts=drafts,
            verify_lengths_R=np.array([2, 2, 0]),
            predicted=None,
            measured=StepSeconds(draft=1.0, schedule=2.0, verify=4.0),
            accepted_R=np.array([2, 0, 0]),
        )
    )
    value = metrics.registry.get_sample_value

    def at(name: str, position: int) -> float | None:
        return value(name, {**LABELS, "position": str(position)})

    assert [at("dspark_expected_accepted_tokens_per_pos_total", position) for position in range(3)] == [0.75, 0.5, 0.0]
    assert [at("dspark_verified_tokens_per_pos_total", position) for position in range(3)] == [2, 2, 0]
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [at(accepted, position) for position in range(4)] == [1, 1, 0, None]
    assert value("vllm:spec_decode_num_drafts_total", LABELS) == 2
    assert value("dspark_step_measured_seconds_total", {**LABELS, "part": "verify"}) == 4.0
    assert value("dspark_verify_length_tokens_bucket", {**LABELS, "le": "1.0"}) == 0


def test_dashboard_and_guide_name_only_what_is_shown(watched):
    client, _, _ = watched
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 40, "ignore_eos": True})
    client.app.state.lifecycle.drain()
    assert client.get("/v1/models").status_code == 503
    shown = samples(client).names
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:vllm:|dspark_)[a-z0-9_]+", text)}
    assert len(asked) > 25
    assert asked <= shown
    explained = re.findall(r"`((?:vllm:|dspark_)[a-z0-9_]+)`", GUIDE.read_text(encoding="utf-8"))
    assert len(explained) > 12
    assert {name for name in explained if not {name, f"{name}_bucket"} & shown} == set()
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
    kinds = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "model_name": "query"}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_a_named_model_is_the_label():
    app, engine, _ = make_app(settings=ServerSettings(model_name="ours"))
    with engine, TestClient(app) as client:
        assert 'vllm:num_requests_running{engine="0",model_name="ours"} 0.0' in client.get("/metrics").text

"""Answers keep to their grammar, and are those that the target would give without speculation."""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher

import dspark.engine.grammar as grammar_module
from dspark.decoding import SamplingSettings
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.choice import Choice
from dspark.engine.core import EngineCore
from dspark.engine.engine import Engine
from dspark.engine.grammar import Grammar, GrammarCompiler, GrammarSource
from dspark.engine.grammar_masks import GrammarMasks
from dspark.engine.grammar_trial import trial_failure
from dspark.engine.request import Request, RequestResult
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.models.block_tables import BLOCK_SIZE
from dspark.models.loading import load_target
from dspark.scheduling import parse_policy
from tests.cli.tokenizer import character_tokenizer
from tests.engine.confident import CONTEXT, make_cost, make_drafter, make_request, make_target
from tests.engine.table_models import TableTarget, random_table
from tests.engine.toy_grammar import END, PATTERN, allowed, constrained_alone, toy_compiler, toy_tokenizer

POLICIES = ("off", "fixed:3", "threshold:0.4", "delayed")
COMPILER = toy_compiler()
GRAMMAR = COMPILER.regex(PATTERN)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "café"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def make_core(policy: str, *, blocks: int = 200, **settings: object) -> EngineCore:
    bytes_per_block = 2 * 4 * BLOCK_SIZE * (1 if policy == "off" else 2)
    made = {
        "max_concurrency": 6,
        "max_prefill_tokens": 8,
        "kv_memory_bytes": blocks * bytes_per_block,
        "max_length": min(CONTEXT, blocks * BLOCK_SIZE - 4),
        **settings,
    }
    return EngineCore(
        make_target(),
        make_drafter(),
        policy=parse_policy(policy),
        cost=make_cost(),
        tokenizer=toy_tokenizer(),
        settings=EngineSettings(**made),  # type: ignore[arg-type]
    )


def run(core: EngineCore, requests: list[Request]) -> list[RequestResult]:
    handles = [core.submit(request) for request in requests]
    core.run()
    assert core.statistics().memory.num_used_blocks == 0
    return [result_of(handle) for handle in handles]


def result_of(handle: RequestHandle) -> RequestResult:
    assert handle.result is not None, handle.error
    return handle.result


def is_prefix_of_the_language(tokens: tuple[int, ...]) -> bool:
    return all(token in allowed(tokens[:place]) for place, token in enumerate(tokens))


# ---- on a target whose answers are known -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks", [200, 8])
def test_an_answer_is_the_masked_targets_own(policy: str, blocks: int) -> None:
    """In company of others with a grammar and without, with choices, penalties, biases, stop tokens and preemptions."""
    core = make_core(policy, blocks=blocks)
    requests = [make_request(seed) for seed in range(40)]
    for number, request in enumerate(requests):
        if number % 4 > 0:
            requests[number] = replace(request, grammar=GRAMMAR)
        if number % 4 > 1:  # long ones
            sampling = replace(request.sampling, logit_bias={4: -5.0, END: -5.0})
            requests[number] = replace(request, grammar=GRAMMAR, sampling=sampling)
    results = run(core, requests)
    reasons = []
    for request, result in zip(requests, results, strict=True):
        if request.grammar is None:
            continue
        for index, completion in enumerate(result.completions):
            assert completion.token_ids == constrained_alone(request, make_target().table_SV, index=index)
            assert (completion.finish_reason == "stop") is (completion.token_ids[-1] == END)
            if completion.finish_reason == "stop":  # also where the request has no stop tokens at all
                assert re.fullmatch(PATTERN, completion.text)
            reasons.append((completion.finish_reason, bool(request.stop_token_ids)))
    assert {("stop", False), ("stop", True), ("length", False)} <= set(reasons)
    assert (core.statistics().steps.preemptions > 0) is (blocks == 8)
    assert (core.statistics().steps.accepted > 0) is (policy != "off")


@pytest.mark.parametrize("policy", ["fixed:3", "delayed"])
def test_unseeded_answers_keep_to_the_grammar(policy: str) -> None:
    sampling = SamplingSettings(temperature=1.5)
    request = Request(prompt_ids=(0, 1), sampling=sampling, grammar=GRAMMAR, max_tokens=12)
    requests = [replace(request, prompt_ids=(number % 5, 1)) for number in range(60)]
    for result in run(make_core(policy), requests):
        (completion,) = result.completions
        assert is_prefix_of_the_language(completion.token_ids)
        assert re.fullmatch(PATTERN, completion.text) or completion.finish_reason == "length"


def test_log_probabilities_are_the_targets_own() -> None:
    request = Request(prompt_ids=(3, 1), grammar=GRAMMAR, logprobs=2, max_tokens=8)
    beside = replace(request, grammar=None)
    table_SV = make_target().table_SV
    for result in run(make_core("fixed:3"), [request, beside]):
        (completion,) = result.completions
        assert completion.logprobs is not None
        for place, logprob in enumerate(completion.logprobs):
            own_V = table_SV.log()[sum((3, 1, *completion.token_ids[:place])) % 7].log_softmax(-1)
            assert logprob.logprob == float(own_V[completion.token_ids[place]])
            assert [token for token, _ in logprob.top] == own_V.topk(2).indices.tolist()


def test_stop_strings_and_cancelling() -> None:
    core = make_core("fixed:3")
    sampling = SamplingSettings(temperature=1.0, seed=5)
    free = Request(prompt_ids=(3, 1), sampling=sampling, grammar=COMPILER.regex("(ab|c){30}"), max_tokens=60)
    (whole,) = run(core, [free])[0].completions
    stop = whole.text[6:9]
    (cut,) = run(core, [replace(free, stop_strings=(stop,))])[0].completions
    assert (cut.finish_reason, cut.text) == ("stop", whole.text[: whole.text.index(stop)])
    handle = core.submit(free)
    for _ in range(3):
        core.step()
    core.cancel(handle)
    (cancelled,) = result_of(handle).completions
    assert cancelled.token_ids == whole.token_ids[: len(cancelled.token_ids)]
    assert 0 < len(cancelled.token_ids) < len(whole.token_ids)
    assert core.statistics().memory.num_used_blocks == 0


def test_ids_without_a_token_are_never_chosen() -> None:
    table_SV = random_table(8, 0)  # two ids more than the tokenizer has
    core = EngineCore(
        TableTarget(table_SV), None, policy=parse_policy("off"), settings=EngineSettings(kv_memory_bytes=10**6)
    )
    grammar = toy_compiler(8).regex("[abc1]*")
    sampling = SamplingSettings(temperature=1.0, logit_bias={6: 50.0, 7: 50.0})
    handles = [core.submit(Request(prompt_ids=(1,), sampling=sampling, grammar=grammar, n=8)) for _ in range(4)]
    core.run()
    tokens = [completion.token_ids for handle in handles for completion in result_of(handle).completions]
    assert all(max(answer) == END for answer in tokens)


def test_rows_behind_a_token_that_leaves_the_grammar_stay_as_they_are() -> None:
    request = Request(prompt_ids=(0,), grammar=GRAMMAR)
    choices = [
        Choice(made, choice_id=number, index=0, max_tokens=9, drafter=None, tokenizer=None)
        for number, made in enumerate([replace(request, grammar=None), request, request])
    ]
    logits_MV = torch.zeros(2 + 4 + 1, 6)
    masked_MV, empty_rows = GrammarMasks(6).apply(choices, [[1], [2, 1, 0], []], logits_MV)
    finite = [{int(token) for token in row.isfinite().nonzero()} for row in masked_MV]
    everything = set(range(6))
    assert finite == [everything, everything, allowed([]), allowed([2]), everything, everything, allowed([])]
    assert empty_rows == {}
    for choice in choices[1:]:
        assert choice.grammar is not None
        choice.grammar.extend([3, 4, END])  # they are where they were


def test_an_answer_behind_its_end_cannot_go_on() -> None:
    state = GRAMMAR.start()
    with pytest.raises(ValueError, match="grammar"):
        state.extend([3, 4, 3])
    other = GRAMMAR.start()  # one answer's error is not another's
    other.extend([3, 4, END])


# ---- what cannot be compiled -----------------------------------------------------------------------------------------


def chain(length: int) -> dict[str, object]:
    definitions: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    definitions[f"d{length}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (lambda made: made.json_schema({"type": "text"}), "json_schema: Invalid type: text"),
        (lambda made: made.json_schema({"type": "array", "uniqueItems": True}), "json_schema: .*uniqueItems"),
        (
            lambda made: made.json_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
            "json_schema: .*uniqueItems",
        ),
        (lambda made: made.json_schema({"$ref": "http://example.com/x"}), "json_schema: .*example.com"),
        (lambda made: made.json_schema({"enum": []}), "json_schema: Unsatisfiable"),
        (lambda made: made.json_schema({"type": "string", "pattern": "(?=a)"}), "json_schema: .*look-around"),
        (lambda made: made.json_schema({"const": {1, 2}}), "json_schema is not JSON"),
        (lambda made: made.json_schema([]), r"json_schema is \[\]"),
        (lambda made: made.json_schema(nested(500)), "json_schema: recursion limit"),
        (lambda made: made.json_schema(nested(5000)), "json_schema is not JSON"),
        (lambda made: made.json_schema(chain(1500)), "json_schema: its rules are nested too deeply"),
        (lambda made: made.json_schema({"enum": ["x" * 100_000]}), "json_schema has 1000.. characters"),
        (lambda made: made.regex("(a"), "regex: .*unclosed group"),
        (lambda made: made.regex(r"[^\s\S]"), "regex: no text"),
        (lambda made: made.regex("x"), "regex: no text of this target's tokens"),
        (lambda made: made.regex("(a{1000}){1000}"), "regex: a mask takes"),
        (lambda made: made.regex(7), "regex is 7"),
        (lambda made: made.lark('start: one\n two: "a"'), 'lark: .*unknown name: "one"'),
        (lambda made: made.lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000))), "lark: its rules"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_name(
    compiled: Callable[[GrammarCompiler], object], message: str
) -> None:
    with pytest.raises(ValueError, match="(?s)" + message):
        compiled(COMPILER)


def test_compiling_without_end_is_stopped() -> None:
    characters = string.ascii_lowercase + string.digits
    patterns = [{"type": "string", "pattern": f".*{character}.*"} for character in characters]
    grammar = LLMatcher.grammar_from_json_schema({"allOf": patterns})
    assert trial_failure(grammar, seconds=1.0) == "it takes more than 1 seconds to compile; make it simpler"
    assert trial_failure(LLMatcher.grammar_from_regex("a|b")) is None


def test_a_target_must_have_a_stop_token_and_a_tokenizer_of_bytes() -> None:
    with pytest.raises(ValueError, match="stop token"):
        GrammarCompiler(toy_tokenizer(), 6, ()).regex("a")
    with pytest.raises(ValueError, match="tokenizer cannot be held to a grammar"):
        GrammarCompiler(character_tokenizer(), 211, {1}).regex("a")


def test_a_grammar_of_another_vocabulary_is_refused() -> None:
    core = make_core("off")
    with pytest.raises(ValueError, match="grammar is for a vocabulary of 8 tokens; this target has 6"):
        core.submit(Request(prompt_ids=(1,), grammar=toy_compiler(8).regex("a")))
    with pytest.raises(ValueError, match="grammar is 'a'"):
        Request(prompt_ids=(1,), grammar="a")  # type: ignore[arg-type]


def test_grammars_are_compiled_once_from_any_thread() -> None:
    compiler = toy_compiler()
    made: list[Grammar] = []
    threads = [threading.Thread(target=lambda: made.append(compiler.regex("[ab]+"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert compiler.regex("[ab]+") is compiler.regex("[ab]+")
    assert compiler.regex("[ab]+") is not compiler.lark('start: "a"')


def test_what_was_refused_is_not_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, tried = toy_compiler(), list[str]()

    def failure(text: str) -> str:
        tried.append(text)
        return "it takes too long"

    monkeypatch.setattr(grammar_module, "trial_failure", failure)
    for _ in range(3):
        with pytest.raises(ValueError, match="regex: it takes too long"):
            compiler.regex("a")
    assert len(tried) == 1
    monkeypatch.setattr(grammar_module, "_REFUSED_SECONDS", 0.0)
    with pytest.raises(ValueError, match="regex: it takes too long"):
        compiler.regex("a")
    assert len(tried) == 2
    for number in range(300):
        with pytest.raises(ValueError, match="it takes too long"):
            compiler.regex(f"a{{1,{number + 1}}}")
    assert len(compiler._refused) == 256


def test_a_namespace_knows_nothing_of_another() -> None:
    compiler, source = toy_compiler(), GrammarSource("regex", "[ab]+")
    made = compiler.compile(source, namespace="one")
    assert compiler.known(source, namespace="one") is made
    assert compiler.known(source, namespace="two") is None
    assert compiler.known(source) is None
    with pytest.raises(ValueError, match="unclosed"):
        compiler.compile(GrammarSource("regex", "(a"), namespace="one")
    assert compiler.known(GrammarSource("regex", "(a"), namespace="two") is None


# ---- on a real model -------------------------------------------------------------------------------------------------


def test_real_answers_parse_and_are_the_same_with_speculation_and_without() -> None:
    target = load_target("embedded")
    drafter = load_drafter("embedded", target.model)
    asked = [{"role": "user", "content": "Describe a person as JSON."}]
    settings = EngineSettings(max_concurrency=6, max_length=200)
    texts: dict[str, list[tuple[str, str]]] = {}
    for policy in ("off", "fixed:3"):
        with Engine(target, drafter, policy=policy, settings=settings) as engine:
            schema, other = engine.grammars.json_schema(PERSON), engine.grammars.regex("[0-9]{3}-[あ-ん]{2,4}😀")
            samplings = [SamplingSettings()] + [SamplingSettings(temperature=0.8, seed=seed) for seed in range(2)]
            generations = [
                engine.submit(messages=asked, grammar=grammar, sampling=sampling, max_tokens=70)
                for grammar in (schema, other)
                for sampling in samplings
            ]
            unseeded = engine.submit(
                messages=asked, grammar=schema, sampling=SamplingSettings(temperature=0.8), n=2, max_tokens=70
            )
            results = [generation.result(300).completions[0] for generation in generations]
            texts[policy] = [(completion.text, completion.finish_reason) for completion in results]
            for completion in (*results[:3], *unseeded.result(300).completions):
                person = json.loads(completion.text)
                assert list(person) == ["name", "age", "tags"]
                assert isinstance(person["name"], str)
                assert len(person["name"]) <= 20
                assert 0 <= person["age"] <= 120
                assert set(person["tags"]) <= {"red", "green", "café"}
                assert completion.finish_reason == "stop"
            for completion in results[3:]:
                assert re.fullmatch("[0-9]{3}-[あ-ん]{2,4}😀", completion.text)
    assert texts["off"] == texts["fixed:3"]
    assert len(set(texts["off"])) > 3

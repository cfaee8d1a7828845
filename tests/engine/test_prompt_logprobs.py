"""Log-probabilities of a prompt's tokens: the target's own, whatever pieces the prompt goes through in."""

from __future__ import annotations

import pytest
import torch

from dspark.engine.core import EngineCore
from dspark.engine.request import Request, TokenLogprob
from dspark.engine.request_handle import RequestHandle
from dspark.engine.settings import EngineSettings
from dspark.models.block_tables import BLOCK_SIZE
from dspark.models.loading import load_target
from dspark.models.target import Target
from dspark.scheduling import parse_policy
from dspark.types import Segment
from tests.engine.confident import make_cost, make_drafter, make_request, make_target
from tests.engine.test_core import alone

PROMPT = tuple((5 * place + place // 3) % 6 for place in range(50))


def make_core(*, blocks: int = 200, **settings: object) -> EngineCore:
    memory = blocks * 2 * 2 * 4 * BLOCK_SIZE
    made = {"max_concurrency": 4, "max_prefill_tokens": 7, "kv_memory_bytes": memory, **settings}
    return EngineCore(
        make_target(),
        make_drafter(),
        policy=parse_policy("fixed:2"),
        cost=make_cost(),
        settings=EngineSettings(**made),  # type: ignore[arg-type]
    )


def expected(target: Target, prompt: tuple[int, ...], top: int) -> list[tuple[int, float, list[float]]]:
    """Token, its log-probability and the largest ones there, of one plain pass."""
    tokens_N = torch.tensor(prompt)
    hidden_NH = target.forward(tokens_N, [Segment(0, 0, len(prompt))], target.new_cache(1, len(prompt))).hidden_NH
    logprobs_NV = target.logits(hidden_NH).float().log_softmax(-1)
    return [
        (prompt[place + 1], float(row_V[prompt[place + 1]]), row_V.topk(top).values.tolist())
        for place, row_V in enumerate(logprobs_NV[:-1])
    ]


def seen(logprobs: tuple[TokenLogprob, ...]) -> list[tuple[int, float, list[float]]]:
    return [(entry.token_id, entry.logprob, [value for _, value in entry.top]) for entry in logprobs]


def of_prompt(handle: RequestHandle) -> tuple[TokenLogprob, ...]:
    assert handle.result is not None
    assert handle.result.prompt_logprobs is not None
    return handle.result.prompt_logprobs


@pytest.mark.parametrize("max_prefill_tokens", [1, 7, 256])
@pytest.mark.parametrize("top", [0, 2])
def test_they_are_those_of_a_plain_pass(max_prefill_tokens: int, top: int) -> None:
    core = make_core(max_prefill_tokens=max_prefill_tokens)
    request = Request(prompt_ids=PROMPT, prompt_logprobs=top, n=3, max_tokens=5)
    others = [make_request(seed) for seed in range(4)]
    handle, *beside = [core.submit(made) for made in (request, *others)]
    core.run()
    assert seen(of_prompt(handle)) == expected(make_target(), PROMPT, top)
    assert handle.result is not None
    assert [completion.token_ids for completion in handle.result.completions] == alone(request)
    for made, result in zip(others, beside, strict=True):
        assert result.result is not None
        assert [completion.token_ids for completion in result.result.completions] == alone(made)
        assert result.result.prompt_logprobs is None
    assert core.statistics().memory.num_used_blocks == 0


def test_nothing_is_reused_for_them_and_what_they_leave_is() -> None:
    core = make_core()
    reused = []
    for asked in (None, 1, None):
        handle = core.submit(Request(prompt_ids=PROMPT, prompt_logprobs=asked, max_tokens=3))
        core.run()
        assert handle.result is not None
        reused.append(handle.result.reused_tokens)
        if asked is not None:
            assert seen(of_prompt(handle)) == expected(make_target(), PROMPT, 1)
    assert reused == [0, 0, 48]


def test_preempted_prompts_go_on_where_they_were() -> None:
    core = make_core(blocks=6, max_length=80, max_prefill_tokens=1)
    core.submit(Request(prompt_ids=(3, 1), max_tokens=70))
    handle = core.submit(Request(prompt_ids=PROMPT, prompt_logprobs=0, max_tokens=5))
    known = 0
    while not handle.is_finished:
        core.step()
        if handle.choices[0].slot is None and not handle.is_finished:
            known = len(handle.choices[0].prompt_logprobs or ())
    assert 0 < known < len(PROMPT) - 1
    assert seen(of_prompt(handle)) == expected(make_target(), PROMPT, 0)


def test_a_prompt_of_one_token_has_none_and_a_cancelled_one_what_was_computed() -> None:
    core = make_core()
    single = core.submit(Request(prompt_ids=(3,), prompt_logprobs=1, max_tokens=2))
    core.run()
    assert of_prompt(single) == ()
    cancelled = core.submit(Request(prompt_ids=PROMPT, prompt_logprobs=1))
    core.step()
    core.cancel(cancelled)
    assert seen(of_prompt(cancelled)) == expected(make_target(), PROMPT, 1)[:7]


def test_they_are_exact_on_a_real_model() -> None:
    """int8 on a CPU: a token's numbers do not depend on the piece that it comes in."""
    target = load_target("embedded").model
    prompt = tuple(range(300, 345))
    settings = EngineSettings(max_concurrency=2, max_length=64, max_prefill_tokens=13)
    core = EngineCore(target, None, policy=parse_policy("off"), settings=settings)
    handle = core.submit(Request(prompt_ids=prompt, prompt_logprobs=2, max_tokens=1))
    core.run()
    assert seen(of_prompt(handle)) == expected(target, prompt, 2)


@pytest.mark.parametrize(
    ("asked", "message"), [(7, "prompt_logprobs is 7; the vocabulary has 6"), (-1, "prompt_logprobs is -1")]
)
def test_what_cannot_be_listed_is_refused(asked: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_core().submit(Request(prompt_ids=(1,), prompt_logprobs=asked))


def test_choices_are_limited() -> None:
    core = make_core(max_choices=3)
    core.check(Request(prompt_ids=(1,), n=3))
    with pytest.raises(ValueError, match=r"n is 4; here it must be at most 3 \(max_choices\)"):
        core.submit(Request(prompt_ids=(1,), n=4))
    with pytest.raises(ValueError, match="max_choices is 0"):
        EngineSettings(max_choices=0)

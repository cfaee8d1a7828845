"""The real thing: SmolLM2-135M-Instruct and our drafter for it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark.cli import main
from dspark.cli.models import Models
from dspark.decoding import SamplingSettings, accept_speculative, sample_rows, token_probs
from dspark.drafters.protocol import greedy_sampler
from dspark.engine.generation import generate
from dspark.engine.result import GenerationResult
from dspark.models.chat import chat_token_ids
from dspark.models.embedded import embedded_target
from dspark.types import Segment

PROMPTS = (
    "What is 17 + 25? Explain step by step.",
    "Write a Python function that reverses a list.",
    "Give me three tips for sleeping better.",
    "Translate 'good morning' to French.",
)


def chat_ids(models: Models, prompt: str) -> list[int]:
    return chat_token_ids(models.target.tokenizer, [{"role": "user", "content": prompt}])


def answer(
    models: Models, prompt: str, settings: SamplingSettings, max_tokens: int, *, speculation: bool
) -> GenerationResult:
    *_, last = generate(
        models.target.model,
        models.drafter if speculation else None,
        chat_ids(models, prompt),
        settings,
        max_tokens=max_tokens,
        stop_token_ids=models.target.stop_token_ids,
        tokenizer=models.target.tokenizer,
    )
    assert last.result is not None
    return last.result


@torch.no_grad()
def test_decoder_matches_transformers(embedded_float32: Models) -> None:
    reference = AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32)
    model = embedded_float32.target.model
    ids = torch.tensor(chat_ids(embedded_float32, PROMPTS[0]))
    expected = reference(ids[None], output_hidden_states=True)
    cache = model.new_cache(1, 64)
    pieces = [
        model.forward(ids[begin:end], [Segment(0, begin, end - begin)], cache, (1, 14, 28))
        for begin, end in ((0, 20), (20, 21), (21, len(ids)))
    ]
    logits = torch.cat([model.logits(piece.hidden_NH) for piece in pieces])
    torch.testing.assert_close(logits, expected.logits[0], atol=1e-4, rtol=0)
    taps = torch.cat([piece.taps_NT for piece in pieces if piece.taps_NT is not None])
    states = torch.cat([expected.hidden_states[layer + 1][0] for layer in (1, 14, 28)], dim=-1)
    torch.testing.assert_close(taps, states, atol=2e-3, rtol=1e-4)


def test_tokenizer_is_that_of_the_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target())
    text = "Digits 2026 one by one,\n  indented `code`: é 中 🙂<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert [t for t in tokens if t in "0123456789"] == ["2", "0", "2", "6"]
    assert tokens[-1] == "<|im_end|>"
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(temperature=1.0, seed=3)])
def test_output_is_the_same_with_and_without_speculation(
    embedded_int8: Models, prompt: str, settings: SamplingSettings
) -> None:
    """In int8 a token has the same bits alone and in a block, so this holds without exception."""
    plain = answer(embedded_int8, prompt, settings, 64, speculation=False)
    speculative = answer(embedded_int8, prompt, settings, 64, speculation=True)
    assert speculative.token_ids == plain.token_ids
    assert speculative.text == plain.text
    assert speculative.verified > 0


def test_the_shipped_drafter_earns_its_keep(embedded_int8: Models) -> None:
    results = [answer(embedded_int8, prompt, SamplingSettings(), 64, speculation=True) for prompt in PROMPTS]
    committed = sum(len(result.token_ids) - 1 for result in results)
    assert committed / sum(result.rounds for result in results) > 1.4


def test_emitted_frequencies_follow_the_target_and_expose_a_wrong_rule(embedded_float32: Models) -> None:
    """One draft token against the real distributions: the p/q rule passes a chi-square test, argmax drafts fail it."""
    target, drafter = embedded_float32.target.model, embedded_float32.drafter
    assert drafter is not None
    settings = SamplingSettings(temperature=1.5, top_k=50)
    context = chat_ids(embedded_float32, PROMPTS[2])
    cache, drafter_cache = target.new_cache(1, 64), drafter.new_cache(1, 64)
    output = target.forward(torch.tensor(context), [Segment(0, 0, len(context))], cache, drafter.tap_layers)
    assert output.taps_NT is not None
    drafter.extend(drafter_cache, [Segment(0, 0, len(context))], torch.tensor(context), output.taps_NT)
    anchor = target.logits(output.hidden_NH[-1:]).argmax(-1)
    logits = []

    def keep(index: int, logits_1D: torch.Tensor, tokens_1k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits.append(logits_1D)
        return greedy_sampler(index, logits_1D, tokens_1k)

    drafter.propose(drafter_cache, [0], anchor, keep, 1)
    columns = drafter.draft_token_ids_D
    assert columns is not None
    draft_probs = token_probs(logits[0], settings, None, columns)
    after_anchor = target.forward(anchor, [Segment(0, len(context), 1)], cache).hidden_NH
    target_probs = token_probs(target.logits(after_anchor), settings).expand(2, -1)

    random = np.random.default_rng(5)
    count = 4000

    def frequencies(drafted: torch.Tensor) -> np.ndarray:
        emitted = np.zeros(target_probs.shape[1])
        for column in drafted.tolist():
            token = int(columns[column])
            result = accept_speculative([token], target_probs, draft_probs, [random.random()], random.random(), columns)
            emitted[token if result.num_accepted else result.next_token] += 1
        return emitted

    expected = target_probs[0].double().numpy()
    expected = expected / expected.sum() * count
    common = expected >= 5

    def p_value(emitted: np.ndarray) -> float:
        observed = [*emitted[common], count - emitted[common].sum()]
        return float(chisquare(observed, [*expected[common], count - expected[common].sum()]).pvalue)

    drawn = sample_rows(draft_probs.expand(count, -1), torch.from_numpy(random.random(count)))
    assert common.sum() >= 5
    assert p_value(frequencies(drawn)) > 1e-3
    assert p_value(frequencies(draft_probs.argmax(-1).expand(count))) < 1e-6


def test_generate_command_prints_what_machines_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPTS[3], "--max-tokens", "12", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["text"]
    assert len(printed["token_ids"]) <= 12
    assert printed["finish_reason"] in ("stop", "length")
    for key in ("rounds", "drafted", "verified", "accepted_length", "seconds"):
        assert printed[key] > 0, key
    assert 0 <= printed["accepted"] <= printed["verified"]

"""A tokenizer of six tokens, a language over them, and an oracle of it that knows nothing of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.engine.batch_sampling import VerifyRow, verify_rows
from dspark.engine.grammar import GrammarCompiler
from dspark.engine.request import Request
from dspark.engine.sampling import request_sampling
from tests.engine.table_models import STATES

TOKENS = ("a", "b", "ab", "c", "1", "<end>")
END = 5
PATTERN = "(ab|c)+1?"
# From a state by a character to the next: "s" at the start, "a" after an a, "m" in the middle, "e" at the end.
_EDGES = {"s": {"a": "a", "c": "m"}, "a": {"b": "m"}, "m": {"a": "a", "c": "m", "1": "e"}, "e": {}}


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, as far as its characters go."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(TOKENS[END], special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TOKENS[END])


def toy_compiler(vocab_size: int = len(TOKENS)) -> GrammarCompiler:
    return GrammarCompiler(toy_tokenizer(), vocab_size, {END})


def allowed(token_ids: Sequence[int]) -> set[int]:
    """What may follow in an answer that keeps to `PATTERN`; nothing behind what left it, or its end."""
    state = _state("s", "".join(TOKENS[token] for token in token_ids))
    if state is None:
        return set()
    fitting = {token for token in range(END) if _state(state, TOKENS[token]) is not None}
    return fitting | ({END} if state in "me" else set())


def _state(state: str, text: str) -> str | None:
    for character in text:
        if character not in _EDGES[state]:
            return None
        state = _EDGES[state][character]
    return state


def constrained_alone(request: Request, table_SV: torch.Tensor, *, index: int = 0) -> tuple[int, ...]:
    """The answer of a request that is held to `PATTERN`, token by token, without any engine, drafter or grammar."""
    settings = request.sampling
    if settings.seed is not None:
        settings = replace(settings, seed=settings.seed + index)
    sampling = request_sampling(settings, request.prompt_ids, None)
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        logits_1V = table_SV.log()[sum((*request.prompt_ids, *answer)) % STATES].clone().unsqueeze(0)
        forbidden = [token for token in range(table_SV.shape[1]) if token not in allowed(answer)]
        logits_1V[:, forbidden] = -torch.inf
        row = VerifyRow(sampling=sampling, draft_tokens=(), draft_probs_LD=None)
        token = verify_rows([row], logits_1V)[0].next_token
        answer.append(token)
        sampling.commit([token])
        if token == END or token in request.stop_token_ids:
            break
    return tuple(answer)

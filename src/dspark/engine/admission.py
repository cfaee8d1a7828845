"""Whether an engine can ever run a request: what cannot is refused when it is submitted, not in a step."""

from __future__ import annotations

import math

from dspark.decoding import SamplingSettings
from dspark.drafters.protocol import Drafter
from dspark.engine.request import Request
from dspark.scheduling import Off, parse_own_policy

__all__ = ["check_fits"]

_FARTHEST = 1e10  # for numbers that logits are added to, multiplied with or divided by: float32 ends at 3e38


def check_fits(
    request: Request,
    *,
    vocab_size: int,
    max_length: int,
    max_choices: int,
    drafter: Drafter | None,
    has_tokenizer: bool,
) -> None:
    """Raise ValueError, naming the field, unless the request can run.

    Args:
        vocab_size: ids of the target.
        max_length: tokens of a prompt and its answer together at most.
        max_choices: ``n`` at most.
        drafter: the engine's, if it has one.
        has_tokenizer: whether the engine knows texts.
    """
    if len(request.prompt_ids) >= max_length:
        raise ValueError(
            f"prompt has {len(request.prompt_ids)} tokens; here a prompt and its answer have {max_length} "
            "together at most (context, max_length or kv_memory_bytes)"
        )
    if not all(0 <= token < vocab_size for token in request.prompt_ids):
        raise ValueError(f"prompt holds a token id outside the vocabulary 0..{vocab_size - 1}")
    _check_sampling(request.sampling, vocab_size)
    _check_policy(request.policy, drafter)
    if request.stop_strings and not has_tokenizer:
        raise ValueError("stop_strings need a tokenizer")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(request, name) or 0) > vocab_size:
            raise ValueError(f"{name} is {getattr(request, name)}; the vocabulary has {vocab_size} tokens")
    if request.n > max_choices:
        raise ValueError(f"n is {request.n}; here it must be at most {max_choices} (max_choices)")
    if request.grammar is not None and request.grammar.vocab_size != vocab_size:
        raise ValueError(
            f"grammar is for a vocabulary of {request.grammar.vocab_size} tokens; this target has {vocab_size}: "
            "compile it with Engine.grammars"
        )


def _check_policy(name: str | None, drafter: Drafter | None) -> None:
    own = None if name is None else parse_own_policy(name)
    if own is None or isinstance(own, Off):
        return
    if drafter is None:
        raise ValueError(f"policy is {name!r}, but this engine runs without a drafter (its policy is off)")
    if own.needs_confidences and not drafter.has_confidence_head:
        raise ValueError(f"policy is {name!r}, but the drafter has no confidence head: give off or fixed:K")


def _check_sampling(settings: SamplingSettings, vocab_size: int) -> None:
    """Refuse what leaves no distribution, or overflows float32 on the way: it would fail in a step, beside others."""
    if any(token >= vocab_size for token in settings.logit_bias):
        raise ValueError(f"logit_bias names a token id outside the vocabulary 0..{vocab_size - 1}")
    forbidden = sum(bias == -math.inf for bias in settings.logit_bias.values())
    if forbidden == vocab_size:
        raise ValueError("logit_bias forbids every token: leave one")
    if any(_FARTHEST < abs(bias) < math.inf for bias in settings.logit_bias.values()):
        raise ValueError(f"logit_bias is beyond {_FARTHEST:g}: give less, or -inf to forbid a token")
    if settings.temperature > _FARTHEST:
        raise ValueError(f"temperature is {settings.temperature:g}; it must be at most {_FARTHEST:g}")
    if not 1 / _FARTHEST <= settings.repetition_penalty <= _FARTHEST:
        raise ValueError(
            f"repetition_penalty is {settings.repetition_penalty:g}; it must be {1 / _FARTHEST:g} to {_FARTHEST:g}"
        )

"""Sampling transforms and acceptance rules: the pure core in which the output stays the target's own.

Functions over tensors and numbers. Nothing here does I/O or holds state, and randomness is always an argument.
"""

from __future__ import annotations

from dspark.decoding.acceptance import (
    Acceptance,
    accept_coupled,
    accept_greedy,
    accept_speculative,
    accept_speculative_rows,
    accept_tempered_rows,
    residual_probs,
)
from dspark.decoding.history import TokenHistory
from dspark.decoding.noise import gumbel_noise, gumbel_of_bits, noise_bits, uniform
from dspark.decoding.request import GenerationCompletion, GenerationRequest
from dspark.decoding.sampling import (
    argmax_rows,
    coupled_sample,
    coupled_sample_bits,
    coupled_sample_rows,
    sample_from,
    sample_rows,
)
from dspark.decoding.settings import SamplingSettings
from dspark.decoding.transforms import token_probs, warp_logits

__all__ = [
    "Acceptance",
    "GenerationCompletion",
    "GenerationRequest",
    "SamplingSettings",
    "TokenHistory",
    "accept_coupled",
    "accept_greedy",
    "accept_speculative",
    "accept_speculative_rows",
    "accept_tempered_rows",
    "argmax_rows",
    "coupled_sample",
    "coupled_sample_bits",
    "coupled_sample_rows",
    "gumbel_noise",
    "gumbel_of_bits",
    "noise_bits",
    "residual_probs",
    "sample_from",
    "sample_rows",
    "token_probs",
    "uniform",
    "warp_logits",
]

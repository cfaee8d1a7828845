"""Randomness as a function of (seed, position): nothing to store, nothing to keep in step.

Philox4x64 is counter-based: the key is the seed, the counter starts at (0, position, stream, 0) and its low word runs
over the values of one call. The same arguments give the same numbers on every device and at any load (the integers are
exact; the logarithms of ``gumbel_noise`` may differ in the last bit between builds of numpy).

How each rule must use it:

* Seeded coupling: ``gumbel_noise(seed, absolute position)`` for the target's sample, and the *same* noise for the draft
  token of that position.
* p/q: noise keyed by the position is wrong here. A position is drafted again after a rejection, and a scheduler that
  remembers confidences of earlier rounds would then know something of the token it is about to admit. Draw fresh
  numbers in every round.
* Without a drafter: ``uniform(seed, absolute position)`` for an inverse-CDF sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

NOISE_BITS = 52
_UINT64 = 2**64
_GUMBEL_STREAM = 0
_UNIFORM_STREAM = 1


def uniform(seed: int, position: int) -> float:
    """One uniform number in (0, 1) for an absolute position; independent of ``gumbel_noise`` there."""
    return float(_open_uniforms(_random_bits(seed, position, _UNIFORM_STREAM, 1))[0])


def gumbel_noise(seed: int, position: int, vocab_size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard Gumbel noise [vocab_size] (CPU), -log(-log(u)), one number for each target token id; always finite.

    Entry i does not depend on ``vocab_size``. float64 by default: in float32 two near-equal scores may tie.
    """
    return gumbel_of_bits(noise_bits(seed, position, vocab_size)).to(dtype)


def noise_bits(seed: int, position: int, vocab_size: int) -> Tensor:
    """The random integers in [0, 2^52) that ``gumbel_noise`` is made of, int64 [vocab_size] (CPU)."""
    return torch.from_numpy(_random_bits(seed, position, _GUMBEL_STREAM, vocab_size).view(np.int64))


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """The Gumbel noise that each of ``noise_bits`` stands for, float64, same shape (CPU)."""
    values = _open_uniforms(bits.numpy())
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    np.negative(values, out=values)
    return torch.from_numpy(values)


def _random_bits(seed: int, position: int, stream: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """52 random bits n a number."""
    if position < 0:
        raise ValueError(f"position is {position}; it must be at least 0")
    key = np.array([seed % _UINT64, 0], dtype=np.uint64)
    counter = np.array([0, position, stream, 0], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.right_shift(bits, np.uint64(12), out=bits)


def _open_uniforms(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(n + 1/2) / 2^52: exactly representable, never 0 or 1."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-NOISE_BITS

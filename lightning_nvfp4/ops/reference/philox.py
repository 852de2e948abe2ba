"""Philox4x32-10: random bits as a pure function of a seed and an element index.

The counter of a draw is the element index over four, the key is the 64-bit seed, so the same seed gives the
same bits on any device, launch grid and memory layout, and no global generator is read or moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.formats.rounding import (
    PHILOX_KEY_INCREMENTS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WORDS,
)

_MASK = 0xFFFFFFFF


def seed_tensor(seed: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return a seed as a 0-dim int64 tensor; integers wrap to 64 bits."""
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64).reshape(())
    wrapped = seed & (2**64 - 1)
    return torch.tensor(wrapped - 2**64 if wrapped >> 63 else wrapped, dtype=torch.int64, device=device)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Run the ten rounds.

    Args:
        key: two int64 tensors of 32-bit words.
        counter: four int64 tensors of 32-bit words.

    Returns:
        Four int64 tensors of 32-bit random words.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    m0, m1 = PHILOX_MULTIPLIERS
    for _ in range(PHILOX_ROUNDS):
        # The products reach 64 bits and wrap as int64; shift and mask read the same halves all the same.
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + PHILOX_KEY_INCREMENTS[0]) & _MASK, (k1 + PHILOX_KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def draw(seed: Tensor, counter: Tensor) -> Tensor:
    """Return int32 (n, 4): the four words of the draws of int64 counters (n,) under a 0-dim int64 seed."""
    zero = torch.zeros_like(counter)
    words = philox((seed & _MASK, (seed >> 32) & _MASK), (counter & _MASK, (counter >> 32) & _MASK, zero, zero))
    return torch.stack(words, dim=-1).to(torch.int32)


def num_draws(count: int) -> int:
    """Return how many draws `count` elements take."""
    return -(-count // PHILOX_WORDS)

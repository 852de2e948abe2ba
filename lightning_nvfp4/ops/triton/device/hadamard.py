"""The Hadamard transform of rows that lie in a tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def butterflies(x, ROWS: tl.constexpr, NUM: tl.constexpr, N: tl.constexpr):
    """Apply the unnormalized Hadamard transform of length N along the last dim of (ROWS, NUM, N), in a fixed order."""
    x = _butterfly(x, ROWS * NUM, N, 1)
    if N > 2:
        x = _butterfly(x, ROWS * NUM, N, 2)
    if N > 4:
        x = _butterfly(x, ROWS * NUM, N, 4)
    if N > 8:
        x = _butterfly(x, ROWS * NUM, N, 8)
    if N > 16:
        x = _butterfly(x, ROWS * NUM, N, 16)
    if N > 32:
        x = _butterfly(x, ROWS * NUM, N, 32)
    if N > 64:
        x = _butterfly(x, ROWS * NUM, N, 64)
    return tl.reshape(x, (ROWS, NUM, N))


@triton.jit
def _butterfly(x, GROUPS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr):
    pairs = tl.permute(tl.reshape(x, (GROUPS * (N // (2 * HALF)), 2, HALF)), (0, 2, 1))
    upper, lower = tl.split(pairs)
    return tl.permute(tl.join(upper + lower, upper - lower), (0, 2, 1))

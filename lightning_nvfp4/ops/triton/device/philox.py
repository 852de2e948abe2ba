"""Random bits in registers: Philox4x32-10 by counter; see `ops.reference.philox`."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.formats.rounding import PHILOX_KEY_INCREMENTS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS
from lightning_nvfp4.ops.triton.device.elements import INTERPRETED

M0, M1 = (tl.constexpr(multiplier) for multiplier in PHILOX_MULTIPLIERS)
K0, K1 = (tl.constexpr(increment) for increment in PHILOX_KEY_INCREMENTS)
ROUNDS = tl.constexpr(PHILOX_ROUNDS)


@triton.jit
def wide_product(a, b: tl.constexpr):
    """Return both halves, lower first, of a product of uint32, as one instruction."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$0, $1}, product; }",
            "=r,=r,r,r", (a, b), (tl.uint32, tl.uint32), True, 1,
        )  # fmt: skip
    product = a.to(tl.uint64) * b
    return product.to(tl.uint32), (product >> 32).to(tl.uint32)


@triton.jit
def philox_words(seed, low, high):
    """Return the four uint32 words of the draws at counters of two uint32 halves under an int64 seed.

    See `ops.reference.philox`. Products are 64 bits wide, one instruction for both halves; Triton's own generator takes
    two. What depends on `high` alone is worked out once for the draws that share it.
    """
    key = seed.to(tl.uint64, bitcast=True)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1 = low, high
    c2, c3 = c0 & 0, c0 & 0
    for _ in tl.static_range(ROUNDS):
        low0, high0 = wide_product(c0, M0)
        low1, high1 = wide_product(c2, M1)
        c0, c2 = high1 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low1, low0
        k0, k1 = k0 + K0, k1 + K1
    return c0, c1, c2, c3


@triton.jit
def random_at(seed, index):
    """Return uint32 random bits of elements by their int64 row-major index, one draw each."""
    w0, w1, w2, w3 = philox_words(seed, (index >> 2).to(tl.uint32), (index >> 34).to(tl.uint32))
    word = (index & 3).to(tl.int32)
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))

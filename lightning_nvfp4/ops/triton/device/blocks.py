"""Device functions on blocks that a thread holds whole: tuples with one tensor for each place in the block."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import (
    MAGNITUDE,
    as_bits,
    fp8_word,
    larger,
)
from lightning_nvfp4.ops.triton.device.tiles import shifted_down


@triton.jit
def largest(rows):
    """Return the int32 magnitude bits of the largest element of each block; NaN is above infinity."""
    top = rows[0]
    for i in tl.static_range(1, len(rows)):
        top = larger(top, rows[i])
    return as_bits(top) & MAGNITUDE


@triton.jit
def word_of(rows, codes, W: tl.constexpr, TOP: tl.constexpr):
    """Return the W-th int32 word of a block's codes, the first code lowest.

    Args:
        rows: the elements of the block, whose signs are taken.
        codes: `round_float`'s codes of the elements in this word.
    """
    per_word: tl.constexpr = 32 // (TOP + 1)
    return _packed(codes, TOP + 1) | _signs(rows, W * per_word, per_word)


@triton.jit
def native_word(scaled, W: tl.constexpr, M: tl.constexpr):
    """Return the W-th int32 word of a block's FP8 codes, rounded to nearest by the device's own conversion."""
    return fp8_word(scaled[W * 4], scaled[W * 4 + 1], scaled[W * 4 + 2], scaled[W * 4 + 3], M)


@triton.jit
def _packed(codes, BITS: tl.constexpr):
    """Return words of codes in the lowest bits of int32, whose next bits up to 16 are zeros; without signs."""
    half: tl.constexpr = 16 // BITS
    low = codes[half - 1]
    high = codes[2 * half - 1]
    for i in tl.static_range(1, half):
        low = low * (1 << BITS) + codes[half - 1 - i]
        high = high * (1 << BITS) + codes[2 * half - 1 - i]
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _signs(rows, START: tl.constexpr, NUM: tl.constexpr):
    """Return the signs of NUM elements of a block at the places of the signs of their codes in a word."""
    bits: tl.constexpr = 32 // NUM
    mask: tl.constexpr = -0x77777778 if bits == 4 else -0x7F7F7F80
    signs = shifted_down(as_bits(rows[START + NUM - 1]), 32 - bits)
    for i in tl.static_range(1, NUM):
        # One shift of two registers.
        signs = (signs << bits) | shifted_down(as_bits(rows[START + NUM - 1 - i]), 32 - bits)
    return signs & mask


@triton.jit
def side_by_side(words, C: tl.constexpr, L: tl.constexpr):
    """Return the words of blocks (C, L) one after the other, (L, C * number of words)."""
    if len(words) == 2:
        joined = tl.join(words[0], words[1])
    else:
        even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
        odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
        joined = tl.reshape(tl.join(even, odd), (C, L, 8))
    return tl.reshape(tl.permute(joined, (1, 0, 2)), (L, C * len(words)))

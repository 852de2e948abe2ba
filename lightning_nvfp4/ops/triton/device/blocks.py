"""Device functions on blocks that a thread holds whole: tuples with one tensor for each place in the block."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import (
    MAGNITUDE,
    absolute_pairs,
    as_bits,
    fp8_word,
    high_half,
    larger,
    larger_pairs,
    low_half,
    round_float,
    stochastic_code,
)
from lightning_nvfp4.ops.triton.device.philox import philox_words
from lightning_nvfp4.ops.triton.device.tiles import shifted_down


@triton.jit
def taken_apart(x, L: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Return the B elements of blocks (L, C, B), which a thread holds whole, as a tuple of (L, C)."""
    parts = (tl.reshape(x, (L, C, B)),)
    for level in tl.static_range(B.bit_length() - 1):
        halves = ()
        for i in tl.static_range(1 << level):
            low, high = tl.split(tl.permute(tl.reshape(parts[i], (L, C, 2, B >> (level + 1))), (0, 1, 3, 2)))
            halves = halves + (low, high)
        parts = halves
    elements = ()
    for i in tl.static_range(B):
        elements = elements + (tl.reshape(parts[i], (L, C)),)
    return elements


@triton.jit
def halves_apart(words):
    """Return the float32 elements, in order, of a tuple of BF16 pairs in int32."""
    elements = ()
    for i in tl.static_range(len(words)):
        elements = elements + (low_half(words[i]), high_half(words[i]))
    return elements


@triton.jit
def largest_of_pairs(words):
    """Return int32 words of the BF16 magnitudes of the largest lower, and the largest higher, of pairs in a tuple."""
    top = absolute_pairs(words[0])
    for i in tl.static_range(1, len(words)):
        top = larger_pairs(top, absolute_pairs(words[i]))
    return top


@triton.jit
def words_of_blocks(
    elements,
    factor,
    seed,
    first,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX: tl.constexpr,
    TOP: tl.constexpr,
    SR: tl.constexpr,
    SATURATE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Round blocks that are neighbours in memory; return tuples of the int32 words of their codes.

    Args:
        elements: float32 (L, C) for each place in a block.
        factor: float32 (L, C).
        seed: int64, for stochastic rounding.
        first: row-major index of the blocks' first elements, a multiple of sixteen.
    """
    per_word: tl.constexpr = 32 // (TOP + 1)
    low, high = (first >> 2).to(tl.uint32), (first >> 34).to(tl.uint32)
    words = ()
    for w in tl.static_range(len(elements) // per_word):
        if NATIVE and TOP == 7 and SR == 0:
            words = words + (native_word(_scaled(elements, factor, w * 4), 0, M),)
        else:
            codes = ()
            for q in tl.static_range(w * per_word // 4, (w + 1) * per_word // 4):
                random = (first, first, first, first)
                if SR > 0:
                    random = philox_words(seed, low + q, high)
                for i in tl.static_range(4):
                    scaled = elements[4 * q + i] * factor
                    if SR > 0:
                        code = stochastic_code(scaled, random[i], M, E, MAX, SR, SATURATE)
                    else:
                        _, code = round_float(scaled, random[i], M, E, MAX, SR, SATURATE)
                    codes = codes + (code,)
            words = words + (word_of(elements, codes, w, TOP, SR > 0),)
    return words


@triton.jit
def _scaled(elements, factor, START: tl.constexpr):
    return (
        elements[START] * factor,
        elements[START + 1] * factor,
        elements[START + 2] * factor,
        elements[START + 3] * factor,
    )


@triton.jit
def together(words, L: tl.constexpr, C: tl.constexpr):
    """Return the words of blocks as one tensor (L, C, number of words)."""
    if len(words) == 2:
        return tl.join(words[0], words[1])
    else:
        even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
        odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
        return tl.reshape(tl.join(even, odd), (L, C, 8))


@triton.jit
def largest(rows):
    """Return the int32 magnitude bits of the largest element of each block; NaN is above infinity."""
    top = rows[0]
    for i in tl.static_range(1, len(rows)):
        top = larger(top, rows[i])
    return as_bits(top) & MAGNITUDE


@triton.jit
def word_of(rows, codes, W: tl.constexpr, TOP: tl.constexpr, NEGATED: tl.constexpr):
    """Return the W-th int32 word of a block's codes, the first code lowest.

    Args:
        rows: the elements of the block, whose signs are taken.
        codes: of the elements in this word, `stochastic_code`'s if NEGATED, else `round_float`'s.
    """
    per_word: tl.constexpr = 32 // (TOP + 1)
    if NEGATED:
        packed = codes[per_word - 1]
        for i in tl.static_range(1, per_word):
            packed = packed * (1 << (TOP + 1)) + codes[per_word - 1 - i]
        packed = -packed
    else:
        packed = _packed(codes, TOP + 1)
    return packed | _signs(rows, W * per_word, per_word)


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
    return tl.reshape(tl.permute(together(words, C, L), (1, 0, 2)), (L, C * len(words)))

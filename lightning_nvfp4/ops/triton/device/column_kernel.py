"""Quantization down the columns of row-major matrices, where a thread holds whole blocks and nothing crosses threads.

A block is a tuple of rows, one tensor (C, L) of neighbouring columns of C blocks for each; of BF16 pairs, (C, L / 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.blocks import (
    largest,
    largest_of_pairs,
    native_word,
    side_by_side,
    word_of,
)
from lightning_nvfp4.ops.triton.device.elements import (
    EXPONENT,
    high_half,
    low_half,
    paired,
    round_float,
    stochastic_code,
    with_sign,
)
from lightning_nvfp4.ops.triton.device.philox import philox_words
from lightning_nvfp4.ops.triton.device.tiles import scales_of


@triton.jit
def columns_kernel(
    x_ptr,
    sixth_ptr,
    tensor_ptr,
    codes_ptr,
    scale_ptr,
    values_ptr,
    seed_ptr,
    num_c,
    msb,
    msl,
    msc,
    NUM_L: tl.constexpr,
    L_FIRST: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TENSOR: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
    NV: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    TOP: tl.constexpr,
    RULE: tl.constexpr,
    ZERO: tl.constexpr,
    SR: tl.constexpr,
    SATURATE: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    L_TILE: tl.constexpr,
):
    """Quantize C blocks of each of L_TILE columns of x (B, K, NUM_L); see `launch.quantize`.

    PAIRS: x is BF16, read two elements at a time. Grid: (tiles of L, tiles of C, B) if L_FIRST, else (tiles of C, tiles
    of L, B). Codes and scales lie along K: a tile of many blocks writes them in whole lines of memory.
    """
    l0 = tl.program_id(0 if L_FIRST else 1) * L_TILE
    c0, b = tl.program_id(1 if L_FIRST else 0) * C, tl.program_id(2).to(tl.int64)
    c = tl.arange(0, C)[:, None]
    l = tl.arange(0, L_TILE)[None, :]
    inside = tl.full((1, 1), 1, tl.int1) if EVEN else (c0 + c < num_c) & (l0 + l < NUM_L)  # whole tiles need no masks
    seed = tl.load(seed_ptr)
    # A constant stride makes the distances of rows constants of the instructions that load and store them.
    base = (b * num_c + c0) * (BLOCK * NUM_L) + l0
    at = c * (BLOCK * NUM_L) + l
    rows = ()
    if PAIRS:
        pair = tl.arange(0, L_TILE // 2)[None, :]
        pair_inside = tl.full((1, 1), 1, tl.int1) if EVEN else (c0 + c < num_c) & (l0 + 2 * pair < NUM_L)
        pairs_at = x_ptr.to(tl.pointer_type(tl.int32)) + base // 2 + (c * (BLOCK * NUM_L // 2) + pair)
        for i in tl.static_range(BLOCK):
            rows = rows + (tl.load(pairs_at + i * (NUM_L // 2), mask=pair_inside, other=0),)
    else:
        x_at = x_ptr + base + at
        for i in tl.static_range(BLOCK):
            rows = rows + (tl.load(x_at + i * NUM_L, mask=inside, other=0.0).to(tl.float32),)
    if HADAMARD:
        rows = _transform(rows, SIGNS, PAIRS, C, L_TILE)
    in_pairs: tl.constexpr = PAIRS or HADAMARD > 0
    if in_pairs:
        tops = largest_of_pairs(rows)
        top = tl.reshape(tl.join(tops << 16, tops & -0x10000), (C, L_TILE))
    else:
        top = largest(rows)
    sixth = 0.0
    decode = 0.0
    if NV:
        if ONE_TENSOR:
            sixth, decode = tl.load(sixth_ptr + b * msb), tl.load(tensor_ptr + b * msb)
        else:
            tensor_at = b * msb + (l0 + l) * msl + (c0 + c) * msc
            sixth = tl.load(sixth_ptr + tensor_at, mask=inside, other=0.0)
            decode = tl.load(tensor_ptr + tensor_at, mask=inside, other=0.0)
    scale_code, scale, factor = scales_of(top, sixth, decode, NV, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    size: tl.constexpr = BLOCK * (TOP + 1) // 32
    native: tl.constexpr = NATIVE and TOP == 7 and SR == 0 and not HAS_VALUES
    codes_alone: tl.constexpr = SR > 0 and not HAS_VALUES
    finite = tl.where(top >= EXPONENT, 0, -1)
    draw = (base >> 2) + ((c * (BLOCK * NUM_L) + 4 * tl.arange(0, L_TILE // 4)[None, :]) >> 2)
    values_at = values_ptr + base + at
    words = ()
    for w in tl.static_range(size):
        codes = ()
        elements = ()
        for i in tl.static_range(w * BLOCK // size, (w + 1) * BLOCK // size):
            x = _joined(rows[i], C, L_TILE) if in_pairs else rows[i]
            scaled = x * factor
            random = x
            if SR > 0:
                random = _random_row(seed, draw + i * (NUM_L // 4), C, L_TILE)
            if native:
                code = scaled
            elif codes_alone:
                code = stochastic_code(scaled, random, M, E, MAX, SR, SATURATE)
            else:
                value, code = round_float(scaled, random, M, E, MAX, SR, SATURATE)
                if HAS_VALUES:
                    value = (with_sign(value, x) * scale).to(values_ptr.dtype.element_ty)
                    tl.store(values_at + i * NUM_L, value, mask=inside)
            codes = codes + (code,)
            elements = elements + (x,)
        if HAS_CODES:
            word = native_word(codes, 0, M) if native else word_of(elements, codes, 0, TOP, codes_alone)
            words = words + (word & finite,)
    if HAS_CODES:
        line = b * NUM_L + l0 + tl.arange(0, L_TILE)[:, None]
        in_line = l0 + tl.arange(0, L_TILE)[:, None] < NUM_L
        w = tl.arange(0, C * size)[None, :]
        inside = tl.full((1, 1), 1, tl.int1) if EVEN else in_line & (c0 * size + w < num_c * size)
        tl.store(codes_ptr + (line * num_c + c0) * size + w, side_by_side(words, C, L_TILE), mask=inside)
        c = tl.arange(0, C)[None, :]
        inside = tl.full((1, 1), 1, tl.int1) if EVEN else in_line & (c0 + c < num_c)
        tl.store(scale_ptr + line * num_c + c0 + c, tl.trans(scale_code.to(tl.uint8)), mask=inside)


@triton.jit
def _joined(pairs, C: tl.constexpr, L: tl.constexpr):
    """Return the float32 elements (C, L) of BF16 pairs."""
    return tl.reshape(tl.join(low_half(pairs), high_half(pairs)), (C, L))


@triton.jit
def _random_row(seed, draw, C: tl.constexpr, L: tl.constexpr):
    """Return uint32 random bits (C, L) of a row, four from each of the draws (C, L / 4)."""
    w0, w1, w2, w3 = philox_words(seed, draw.to(tl.uint32), (draw >> 32).to(tl.uint32))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (C, L))


@triton.jit
def _transform(rows, SIGNS: tl.constexpr, PAIRS: tl.constexpr, C: tl.constexpr, L: tl.constexpr):
    """Apply the random Hadamard transform of length 16 across a tuple of rows, as `tiles.transform`; return pairs."""
    lows = ()
    highs = ()
    for i in tl.static_range(16):
        if PAIRS:
            low, high = low_half(rows[i]), high_half(rows[i])
        else:
            low, high = tl.split(tl.reshape(rows[i], (C, L // 2, 2)))
        lows = lows + (low * (-0.25 if (SIGNS >> i) & 1 else 0.25),)
        highs = highs + (high * (-0.25 if (SIGNS >> i) & 1 else 0.25),)
    lows = _butterflies(_butterflies(_butterflies(_butterflies(lows, 1), 2), 4), 8)
    highs = _butterflies(_butterflies(_butterflies(_butterflies(highs, 1), 2), 4), 8)
    rounded = ()
    for i in tl.static_range(16):
        rounded = rounded + (paired(lows[i], highs[i]),)
    return rounded


@triton.jit
def _butterflies(rows, HALF: tl.constexpr):
    mixed = ()
    for i in tl.static_range(16):
        if i & HALF:
            mixed = mixed + (rows[i - HALF] - rows[i],)
        else:
            mixed = mixed + (rows[i] + rows[i + HALF],)
    return mixed

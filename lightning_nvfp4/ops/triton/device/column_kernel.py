"""Quantization down the columns of row-major matrices, where a thread holds whole blocks and nothing crosses threads.

A block is a tuple of rows, one tensor of neighbouring columns for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import (
    EXPONENT,
    MAGNITUDE,
    SIGN,
    as_bits,
    round_float,
    with_sign,
)
from lightning_nvfp4.ops.triton.device.tiles import random_matrix, scales_of, shifted_down, to_bf16


@triton.jit
def columns_kernel(
    x_ptr,
    sixth_ptr,
    tensor_ptr,
    codes_ptr,
    scale_ptr,
    values_ptr,
    seed_ptr,
    num_l,
    num_c,
    msb,
    msl,
    msc,
    HAS_CODES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    EVEN: tl.constexpr,
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
    BLOCKS: tl.constexpr,
    L_TILE: tl.constexpr,
):
    """Quantize BLOCKS blocks of each of L_TILE columns of x (B, K, L); see `launch.quantize`.

    Grid: (C / BLOCKS, tiles of L, B). Codes and scales lie along K, so that more blocks make longer writes.
    """
    c0, b = tl.program_id(0) * BLOCKS, tl.program_id(2).to(tl.int64)
    l0 = tl.program_id(1) * L_TILE
    l = l0 + tl.arange(0, L_TILE)
    inside = tl.full((1,), 1, tl.int1) if EVEN else l < num_l  # whole tiles need no masks
    seed = tl.load(seed_ptr)
    line = b * num_l + l
    per_word: tl.constexpr = 32 // (TOP + 1)
    words_per_block: tl.constexpr = BLOCK // per_word
    scale_codes = tl.zeros((L_TILE,), tl.int32)
    for j in range(BLOCKS):
        base = (b * num_c + c0 + j) * BLOCK * num_l
        rows = ()
        for i in tl.static_range(BLOCK):
            rows = rows + (tl.load(x_ptr + base + l + i * num_l, mask=inside, other=0.0).to(tl.float32),)
        if HADAMARD:
            rows = _transform(rows, SIGNS)
        top = as_bits(rows[0]) & MAGNITUDE
        for i in tl.static_range(1, BLOCK):
            top = tl.maximum(top, as_bits(rows[i]) & MAGNITUDE)
        sixth = 0.0
        decode = 0.0
        if NV:
            at = b * msb + l * msl + (c0 + j) * msc
            sixth = tl.load(sixth_ptr + at, mask=inside, other=0.0)
            decode = tl.load(tensor_ptr + at, mask=inside, other=0.0)
        scale_code, scale, factor = scales_of(top, sixth, decode, NV, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
        scale_codes = shifted_down(scale_codes, 8) | (scale_code << 24)
        word = top
        words = ()
        for i in tl.static_range(BLOCK):
            x = rows[i]
            random = as_bits(x)
            if SR > 0:
                random = tl.reshape(random_matrix(seed, base + i * num_l + l0, num_l, True, 1, L_TILE), (L_TILE,))
            value, code = round_float(x * factor, random, M, E, MAX, SR, SATURATE)
            if HAS_VALUES:
                value = (with_sign(value, x) * scale).to(values_ptr.dtype.element_ty)
                tl.store(values_ptr + base + l + i * num_l, value, mask=inside)
            if HAS_CODES:
                code = (code << (31 - TOP)) | (as_bits(x) & SIGN)
                word = code if i % per_word == 0 else code | shifted_down(word, TOP + 1)
                if i % per_word == per_word - 1:
                    words = words + (word & tl.where(top >= EXPONENT, 0, -1),)
        if HAS_CODES:
            at = codes_ptr + (line * num_c + c0 + j) * words_per_block
            if words_per_block == 2:
                joined = tl.join(words[0], words[1])
            else:
                even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
                odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
                joined = tl.reshape(tl.join(even, odd), (L_TILE, 8))
            tl.store(at[:, None] + tl.arange(0, words_per_block)[None, :], joined, mask=inside[:, None])
    if HAS_CODES:
        at = scale_ptr + line * num_c + c0
        if BLOCKS == 4:
            tl.store(at.to(tl.pointer_type(tl.int32)), scale_codes, mask=inside)
        else:
            tl.store(at, (scale_codes >> 24).to(tl.uint8), mask=inside)


@triton.jit
def _transform(rows, SIGNS: tl.constexpr):
    """Apply the random Hadamard transform of length 16 across a tuple of rows, as `tiles.transform`."""
    mixed = ()
    for i in tl.static_range(16):
        mixed = mixed + (rows[i] * (-0.25 if (SIGNS >> i) & 1 else 0.25),)
    mixed = _butterflies(_butterflies(_butterflies(_butterflies(mixed, 1), 2), 4), 8)
    rounded = ()
    for i in tl.static_range(16):
        rounded = rounded + (to_bf16(mixed[i]),)
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

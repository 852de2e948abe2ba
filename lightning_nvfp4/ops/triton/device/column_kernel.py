"""Quantization down the columns of row-major matrices, where a thread holds whole blocks and nothing crosses threads.

A block is a tuple of rows, one tensor (C, L) of neighbouring columns of C blocks for each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.blocks import largest, native_word, side_by_side, word_of
from lightning_nvfp4.ops.triton.device.elements import EXPONENT, as_bits, round_float, with_sign
from lightning_nvfp4.ops.triton.device.tiles import random_matrix, scales_of, to_bf16


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
    ONE_TENSOR: tl.constexpr,
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
    """Quantize C blocks of each of L_TILE columns of x (B, K, L); see `launch.quantize`.

    Grid: (tiles of C, tiles of L, B). Codes and scales lie along K: a tile of many blocks writes them in whole lines of
    memory.
    """
    c0, b = tl.program_id(0) * C, tl.program_id(2).to(tl.int64)
    l0 = tl.program_id(1) * L_TILE
    c = tl.arange(0, C)[:, None]
    l = tl.arange(0, L_TILE)[None, :]
    inside = tl.full((1, 1), 1, tl.int1) if EVEN else (c0 + c < num_c) & (l0 + l < num_l)  # whole tiles need no masks
    seed = tl.load(seed_ptr)
    base = (b * num_c + c0) * BLOCK * num_l + l0
    at = c * (BLOCK * num_l) + l
    rows = ()
    for i in tl.static_range(BLOCK):
        rows = rows + (tl.load(x_ptr + base + i * num_l + at, mask=inside, other=0.0).to(tl.float32),)
    if HADAMARD:
        rows = _transform(rows, SIGNS)
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
    finite = tl.where(top >= EXPONENT, 0, -1)
    scaled = ()
    for i in tl.static_range(BLOCK if native else 0):
        scaled = scaled + (rows[i] * factor,)
    words = ()
    for w in tl.static_range(size):
        codes = ()
        for i in tl.static_range(w * BLOCK // size, 0 if native else (w + 1) * BLOCK // size):
            x = rows[i]
            random = random_matrix(seed, base + i * num_l, BLOCK * num_l, True, C, L_TILE) if SR > 0 else as_bits(x)
            value, code = round_float(x * factor, random, M, E, MAX, SR, SATURATE)
            if HAS_VALUES:
                value = (with_sign(value, x) * scale).to(values_ptr.dtype.element_ty)
                tl.store(values_ptr + base + i * num_l + at, value, mask=inside)
            codes = codes + (code,)
        if HAS_CODES:
            word = native_word(scaled, w, M) if native else word_of(rows, codes, w, TOP)
            words = words + (word & finite,)
    if HAS_CODES:
        line = b * num_l + l0 + tl.arange(0, L_TILE)[:, None]
        in_line = l0 + tl.arange(0, L_TILE)[:, None] < num_l
        w = tl.arange(0, C * size)[None, :]
        inside = tl.full((1, 1), 1, tl.int1) if EVEN else in_line & (c0 * size + w < num_c * size)
        tl.store(codes_ptr + (line * num_c + c0) * size + w, side_by_side(words, C, L_TILE), mask=inside)
        c = tl.arange(0, C)[None, :]
        inside = tl.full((1, 1), 1, tl.int1) if EVEN else in_line & (c0 + c < num_c)
        tl.store(scale_ptr + line * num_c + c0 + c, tl.trans(scale_code.to(tl.uint8)), mask=inside)


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

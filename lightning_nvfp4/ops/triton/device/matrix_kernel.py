"""Kernels on matrices whose values stay in their layout: MXFP8 along both dims at once, and NVFP4 to MXFP8."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.blocks import largest, largest_of_pairs
from lightning_nvfp4.ops.triton.device.elements import (
    E2M1_PLACE,
    MAGNITUDE,
    as_bits,
    as_float,
    e8m0_scales,
    high_half,
    low_half,
    paired,
    round_float,
    scaled_e4m3,
    through_fp8,
    with_sign,
)
from lightning_nvfp4.ops.triton.device.tiles import random_matrix


@triton.jit
def both_kernel(
    x_ptr,
    row_values_ptr,
    column_values_ptr,
    seed_ptr,
    num_r,
    num_k,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    RULE: tl.constexpr,
    ZERO: tl.constexpr,
    SR: tl.constexpr,
    SATURATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    R_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    """Quantize a tile of x (R, K) along K (row outputs) and along R (column outputs); see `launch.both`.

    Values are in x's layout.
    """
    tiles_k = tl.cdiv(num_k, K_TILE)
    r0 = (tl.program_id(0) // tiles_k) * R_TILE
    k0 = (tl.program_id(0) % tiles_k) * K_TILE
    r = tl.arange(0, R_TILE)[:, None]
    k = tl.arange(0, K_TILE)[None, :]
    # Whole tiles need no masks.
    inside = tl.full((1, 1), 1, tl.int1) if EVEN else (r0 + r < num_r) & (k0 + k < num_k)
    base = r0.to(tl.int64) * num_k + k0
    x = tl.load(x_ptr + base + r * num_k + k, mask=inside, other=0.0).to(tl.float32)
    random = as_bits(x)
    if SR > 0:
        random = random_matrix(tl.load(seed_ptr), base, num_k, ALIGNED, R_TILE, K_TILE)
    magnitude = as_bits(x) & MAGNITUDE
    row_top = tl.max(tl.reshape(magnitude, (R_TILE, K_TILE // 32, 32)), axis=2)
    _, row_value, row_factor = e8m0_scales(row_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    column_top = tl.max(tl.reshape(magnitude, (R_TILE // 32, 32, K_TILE)), axis=1)
    _, column_value, column_factor = e8m0_scales(column_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    row, _ = round_float(x * _along_rows(row_factor, R_TILE, K_TILE, 32), random, M, E, MAX, SR, SATURATE)
    column, _ = round_float(x * _along_columns(column_factor, R_TILE, K_TILE), random, M, E, MAX, SR, SATURATE)
    at = base + r * num_k + k
    row = with_sign(row, x) * _along_rows(row_value, R_TILE, K_TILE, 32)
    column = with_sign(column, x) * _along_columns(column_value, R_TILE, K_TILE)
    tl.store(row_values_ptr + at, row.to(row_values_ptr.dtype.element_ty), mask=inside)
    tl.store(column_values_ptr + at, column.to(column_values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def requantize_kernel(
    codes_ptr,
    source_scale_ptr,
    tensor_ptr,
    values_ptr,
    seed_ptr,
    num_n,
    tensor_stride_e,
    tensor_stride_n,
    NUM_K: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    RULE: tl.constexpr,
    ZERO: tl.constexpr,
    SR: tl.constexpr,
    SATURATE: tl.constexpr,
    EVEN: tl.constexpr,
    K_TILE: tl.constexpr,
):
    """Decode NVFP4 along K and quantize to MXFP8 along N, 32 rows at a time; see `launch.requantize`.

    A thread holds its columns' 32 rows, so that nothing crosses threads: the even columns, whose codes are the lower
    halves of bytes, and the odd ones. Grid: (tiles of K, tiles of N, experts).
    """
    expert = tl.program_id(2).to(tl.int64)
    n0, k0 = tl.program_id(1) * 32, tl.program_id(0) * K_TILE
    stored: tl.constexpr = (NUM_K + 1) // 2
    blocks: tl.constexpr = (NUM_K + 15) // 16
    line = expert * num_n + n0
    pair = k0 // 2 + tl.arange(0, K_TILE // 2)
    codes_at = codes_ptr + line * stored + pair
    scale_at = source_scale_ptr + line * blocks + pair // 8
    tensor_at = tensor_ptr + expert * tensor_stride_e + n0 * tensor_stride_n
    always = tl.full((1,), 1, tl.int1)  # whole tiles need no masks
    evens = ()
    odds = ()
    for i in tl.static_range(32):
        here = n0 + i < num_n
        inside = always if EVEN else here & (pair < stored)
        byte = tl.load(codes_at + i * stored, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        scale = scaled_e4m3(tl.load(scale_at + i * blocks, mask=inside, other=0).to(tl.int32), 119, NATIVE)
        tensor = tl.load(tensor_at + i * tensor_stride_n, mask=True if EVEN else here, other=0.0) * 128.0
        # E2M1 in the place of a float32's lowest exponent bits is 2^-126 of its value; the two scales make that good.
        even = (as_float(((byte << 28) >> 6) & E2M1_PLACE) * scale) * tensor
        odd = (as_float((byte << 18) & E2M1_PLACE) * scale) * tensor
        if BF16:
            evens = evens + (paired(even, odd),)
        else:
            evens, odds = evens + (even,), odds + (odd,)
    if BF16:
        tops = largest_of_pairs(evens)
        even_top, odd_top = tops << 16, tops & -0x10000
    else:
        even_top, odd_top = largest(evens), largest(odds)
    _, even_value, even_factor = e8m0_scales(even_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    _, odd_value, odd_factor = e8m0_scales(odd_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    k = k0 + tl.arange(0, K_TILE)
    values_at = values_ptr + line * NUM_K + k
    seed = tl.load(seed_ptr)
    for i in tl.static_range(32):
        if BF16:
            even, odd = low_half(evens[i]), high_half(evens[i])
        else:
            even, odd = evens[i], odds[i]
        if NATIVE and SR == 0:
            even, odd = through_fp8(even * even_factor, odd * odd_factor, M)
        else:
            even_random, odd_random = as_bits(even), as_bits(odd)
            if SR > 0:
                random = random_matrix(seed, (line + i) * NUM_K + k0, NUM_K, NUM_K % 4 == 0, 1, K_TILE)
                even_random, odd_random = tl.split(tl.reshape(random, (K_TILE // 2, 2)))
            rounded, _ = round_float(even * even_factor, even_random, M, E, MAX, SR, SATURATE)
            even = with_sign(rounded, even)
            rounded, _ = round_float(odd * odd_factor, odd_random, M, E, MAX, SR, SATURATE)
            odd = with_sign(rounded, odd)
        out = tl.reshape(tl.join(even * even_value, odd * odd_value), (K_TILE,)).to(values_ptr.dtype.element_ty)
        tl.store(values_at + i * NUM_K, out, mask=always if EVEN else (n0 + i < num_n) & (k < NUM_K))


@triton.jit
def _along_rows(per_block, R_TILE: tl.constexpr, K_TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Repeat a number for each BLOCK elements of a row."""
    wide = tl.broadcast_to(tl.reshape(per_block, (R_TILE, K_TILE // BLOCK, 1)), (R_TILE, K_TILE // BLOCK, BLOCK))
    return tl.reshape(wide, (R_TILE, K_TILE))


@triton.jit
def _along_columns(per_block, R_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """Repeat a number for each 32 elements of a column."""
    tall = tl.broadcast_to(tl.reshape(per_block, (R_TILE // 32, 1, K_TILE)), (R_TILE // 32, 32, K_TILE))
    return tl.reshape(tall, (R_TILE, K_TILE))

"""Kernels on matrices whose values stay in their layout: MXFP8 along both dims at once, and NVFP4 to MXFP8."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.blocks import largest
from lightning_nvfp4.ops.triton.device.elements import (
    EXPONENT,
    MAGNITUDE,
    as_bits,
    decode_float,
    e4m3_value,
    e8m0_scales,
    round_float,
    with_sign,
    with_sign_code,
)
from lightning_nvfp4.ops.triton.device.tiles import random_matrix, to_bf16


@triton.jit
def both_kernel(
    x_ptr,
    row_codes_ptr,
    row_scale_ptr,
    row_values_ptr,
    column_codes_ptr,
    column_scale_ptr,
    column_values_ptr,
    seed_ptr,
    num_r,
    num_k,
    HAS_CODES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
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

    Values are in x's layout; codes and scales of the columns are those of the transpose.
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
    row_scale, row_value, row_factor = e8m0_scales(row_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    column_top = tl.max(tl.reshape(magnitude, (R_TILE // 32, 32, K_TILE)), axis=1)
    column_scale, column_value, column_factor = e8m0_scales(column_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    row, row_code = round_float(x * _along_rows(row_factor, R_TILE, K_TILE, 32), random, M, E, MAX, SR, SATURATE)
    column, column_code = round_float(
        x * _along_columns(column_factor, R_TILE, K_TILE), random, M, E, MAX, SR, SATURATE
    )
    if HAS_VALUES:
        at = base + r * num_k + k
        row = with_sign(row, x) * _along_rows(row_value, R_TILE, K_TILE, 32)
        column = with_sign(column, x) * _along_columns(column_value, R_TILE, K_TILE)
        tl.store(row_values_ptr + at, row.to(row_values_ptr.dtype.element_ty), mask=inside)
        tl.store(column_values_ptr + at, column.to(column_values_ptr.dtype.element_ty), mask=inside)
    if HAS_CODES:
        code = with_sign_code(row_code, x, 7) & _along_rows(tl.where(row_top >= EXPONENT, 0, -1), R_TILE, K_TILE, 32)
        tl.store(row_codes_ptr + base + r * num_k + k, code.to(tl.uint8), mask=inside)
        num_c = tl.cdiv(num_k, 32)
        c = tl.arange(0, K_TILE // 32)[None, :]
        at = row_scale_ptr + (r0 + r).to(tl.int64) * num_c + k0 // 32 + c
        tl.store(at, row_scale.to(tl.uint8), mask=(r0 + r < num_r) & (k0 // 32 + c < num_c))
        finite = _along_columns(tl.where(column_top >= EXPONENT, 0, -1), R_TILE, K_TILE)
        code = with_sign_code(column_code, x, 7) & finite
        r_last = tl.arange(0, R_TILE)[None, :]
        k_first = tl.arange(0, K_TILE)[:, None]
        at = column_codes_ptr + (k0 + k_first).to(tl.int64) * num_r + r0 + r_last
        tl.store(at, tl.trans(code.to(tl.uint8)), mask=(k0 + k_first < num_k) & (r0 + r_last < num_r))
        num_c = tl.cdiv(num_r, 32)
        c = tl.arange(0, R_TILE // 32)[:, None]
        at = column_scale_ptr + (k0 + k).to(tl.int64) * num_c + r0 // 32 + c
        tl.store(at, column_scale.to(tl.uint8), mask=(k0 + k < num_k) & (r0 // 32 + c < num_c))


@triton.jit
def requantize_kernel(
    codes_ptr,
    source_scale_ptr,
    tensor_ptr,
    values_ptr,
    seed_ptr,
    num_n,
    num_k,
    stored,
    source_blocks,
    tensor_stride_e,
    tensor_stride_n,
    BF16: tl.constexpr,
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
    K_TILE: tl.constexpr,
):
    """Decode NVFP4 along K and quantize to MXFP8 along N, 32 rows at a time; see `launch.requantize`.

    A thread holds its columns' 32 rows, so that nothing crosses threads. Grid: (tiles of K, tiles of N, experts).
    """
    expert = tl.program_id(2).to(tl.int64)
    n0, k0 = tl.program_id(1) * 32, tl.program_id(0) * K_TILE
    line = expert * num_n + n0
    byte = k0 // 2 + tl.arange(0, K_TILE // 2)
    block = k0 // 16 + tl.arange(0, K_TILE // 16)
    k = k0 + tl.arange(0, K_TILE)
    codes_at = codes_ptr + line * stored + byte
    scale_at = source_scale_ptr + line * source_blocks + block
    tensor_at = tensor_ptr + expert * tensor_stride_e + n0 * tensor_stride_n
    always = tl.full((1,), 1, tl.int1)  # whole tiles need no masks
    rows = ()
    for i in tl.static_range(32):
        here = n0 + i < num_n
        code = tl.load(codes_at + i * stored, mask=always if EVEN else here & (byte < stored), other=0).to(tl.int32)
        code = tl.reshape(tl.join(code << 28, code << 24), (K_TILE,))
        inside = always if EVEN else here & (block < source_blocks)
        scale = e4m3_value(tl.load(scale_at + i * source_blocks, mask=inside, other=0).to(tl.int32))
        scale = tl.reshape(tl.broadcast_to(scale[:, None], (K_TILE // 16, 16)), (K_TILE,))
        tensor = tl.load(tensor_at + i * tensor_stride_n, mask=here, other=0.0)
        x = (decode_float(code, 1, 0, 3) * scale) * tensor
        if BF16:
            x = to_bf16(x)
        rows = rows + (x,)
    top = largest(rows)
    _, value, factor = e8m0_scales(top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    values_at = values_ptr + line * num_k + k
    seed = tl.load(seed_ptr)
    for i in tl.static_range(32):
        x = rows[i]
        random = as_bits(x)
        if SR > 0:
            random = tl.reshape(random_matrix(seed, (line + i) * num_k + k0, num_k, ALIGNED, 1, K_TILE), (K_TILE,))
        rounded, _ = round_float(x * factor, random, M, E, MAX, SR, SATURATE)
        out = (with_sign(rounded, x) * value).to(values_ptr.dtype.element_ty)
        tl.store(values_at + i * num_k, out, mask=always if EVEN else (n0 + i < num_n) & (k < num_k))


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

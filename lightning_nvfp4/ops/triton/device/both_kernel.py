"""MXFP8 along rows and along columns in one read of a matrix, with one random draw for both."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import (
    EXPONENT,
    MAGNITUDE,
    as_bits,
    e8m0_scales,
    lowest_of,
    philox_words,
    plain_scales,
    random_at,
    round_float,
    round_unscaled,
    sign_code,
    with_sign,
)


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
        seed = tl.load(seed_ptr)
        if ALIGNED:
            four = 4 * tl.arange(0, K_TILE // 4)[None, :]
            w0, w1, w2, w3 = philox_words(seed, (base + r * num_k + four) >> 2)
            random = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (R_TILE, K_TILE))
        else:
            random = random_at(seed, base + r * num_k + k)
    magnitude = as_bits(x) & MAGNITUDE
    row_top = tl.max(tl.reshape(magnitude, (R_TILE, K_TILE // 32, 32)), axis=2)
    row_scale, row_value, row_factor = e8m0_scales(row_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    column_top = tl.max(tl.reshape(magnitude, (R_TILE // 32, 32, K_TILE)), axis=1)
    column_scale, column_value, column_factor = e8m0_scales(column_top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    plain = tl.minimum(plain_scales(row_top, row_scale), plain_scales(column_top, column_scale))
    if (plain == 1) & (RULE != 0):
        lowest = _along_rows(lowest_of(row_scale, E), R_TILE, K_TILE)
        row, row_code = round_unscaled(x, lowest, random, M, SR)
        lowest = _along_columns(lowest_of(column_scale, E), R_TILE, K_TILE)
        column, column_code = round_unscaled(x, lowest, random, M, SR)
    else:
        row, row_code = round_float(x * _along_rows(row_factor, R_TILE, K_TILE), random, M, E, MAX, SR)
        row = row * _along_rows(row_value, R_TILE, K_TILE)
        factor = _along_columns(column_factor, R_TILE, K_TILE)
        column, column_code = round_float(x * factor, random, M, E, MAX, SR)
        column = column * _along_columns(column_value, R_TILE, K_TILE)
    if HAS_VALUES:
        at = base + r * num_k + k
        tl.store(row_values_ptr + at, with_sign(row, x).to(row_values_ptr.dtype.element_ty), mask=inside)
        tl.store(column_values_ptr + at, with_sign(column, x).to(column_values_ptr.dtype.element_ty), mask=inside)
    if HAS_CODES:
        code = (row_code | sign_code(x, 7)) & _along_rows(tl.where(row_top >= EXPONENT, 0, -1), R_TILE, K_TILE)
        tl.store(row_codes_ptr + base + r * num_k + k, code.to(tl.uint8), mask=inside)
        num_c = tl.cdiv(num_k, 32)
        c = tl.arange(0, K_TILE // 32)[None, :]
        at = row_scale_ptr + (r0 + r).to(tl.int64) * num_c + k0 // 32 + c
        tl.store(at, row_scale.to(tl.uint8), mask=(r0 + r < num_r) & (k0 // 32 + c < num_c))
        finite = _along_columns(tl.where(column_top >= EXPONENT, 0, -1), R_TILE, K_TILE)
        code = (column_code | sign_code(x, 7)) & finite
        r_last = tl.arange(0, R_TILE)[None, :]
        k_first = tl.arange(0, K_TILE)[:, None]
        at = column_codes_ptr + (k0 + k_first).to(tl.int64) * num_r + r0 + r_last
        tl.store(at, tl.trans(code.to(tl.uint8)), mask=(k0 + k_first < num_k) & (r0 + r_last < num_r))
        num_c = tl.cdiv(num_r, 32)
        c = tl.arange(0, R_TILE // 32)[:, None]
        at = column_scale_ptr + (k0 + k).to(tl.int64) * num_c + r0 // 32 + c
        tl.store(at, column_scale.to(tl.uint8), mask=(k0 + k < num_k) & (r0 // 32 + c < num_c))


@triton.jit
def _along_rows(per_block, R_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """Repeat a number for each 32 elements of a row."""
    wide = tl.broadcast_to(tl.reshape(per_block, (R_TILE, K_TILE // 32, 1)), (R_TILE, K_TILE // 32, 32))
    return tl.reshape(wide, (R_TILE, K_TILE))


@triton.jit
def _along_columns(per_block, R_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """Repeat a number for each 32 elements of a column."""
    tall = tl.broadcast_to(tl.reshape(per_block, (R_TILE // 32, 1, K_TILE)), (R_TILE // 32, 32, K_TILE))
    return tl.reshape(tall, (R_TILE, K_TILE))

"""Kernels between rows of a matrix and rows of a wire: gather, encode, decode, scatter, and sum by token.

The bytes of a row of a wire are those of `ops.wire.row_layout`. Rows are numbered by int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import (
    EXPONENT,
    as_bits,
    as_float,
    encode_tensor_scale,
    reciprocal,
    sixth_of,
)
from lightning_nvfp4.ops.triton.device.tiles import (
    block_tops,
    bytes_of,
    decode_tile,
    finite_top,
    inverse,
    load_blocks,
    pack,
    round_tile,
    scales_of,
    transform,
)


@triton.jit
def encode_kernel(
    x_ptr,
    index_ptr,
    wire_ptr,
    tensor_ptr,
    num_rows,
    num_k,
    x_stride,
    size,
    scales,
    INDEXED: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
    NV: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    TOP: tl.constexpr,
    RULE: tl.constexpr,
    ZERO: tl.constexpr,
    SATURATE: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize one tile of rows x[index] into the wire; with NV a tile has whole rows, and so their amax."""
    l0, k0 = tl.program_id(0).to(tl.int64) * L_TILE, tl.program_id(1) * C * BLOCK
    l = l0 + tl.arange(0, L_TILE)[:, None, None]
    k = k0 + tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    inside = (l < num_rows) & (k < num_k)
    source = l
    if INDEXED:
        source = tl.load(index_ptr + l, mask=l < num_rows, other=0)
    if WHOLE:
        first = k0 + tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, 8)[None, None, :]
        x = load_blocks(x_ptr + source * x_stride + first, l < num_rows, L_TILE, C, BLOCK, 8).to(tl.float32)
    else:
        x = tl.load(x_ptr + source * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if HADAMARD:
        x = transform(x, SIGNS, HADAMARD, L_TILE, C, BLOCK)
    top = block_tops(x, 1, L_TILE, C)
    row = l0 + tl.arange(0, L_TILE)[:, None]
    sixth = 0.0
    decode = 0.0
    if NV:
        encode = encode_tensor_scale(as_float(finite_top(x))[:, None])
        sixth, decode = sixth_of(encode), reciprocal(encode)
        tl.store(tensor_ptr + row * (size // 4), decode, mask=row < num_rows)
    scale_code, scale, factor = scales_of(top, sixth, decode, NV, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    _, code = round_tile(x, factor, scale, as_bits(x), M, E, MAX, TOP, 0, SATURATE)
    c = k0 // BLOCK + tl.arange(0, C)[None, :]
    tl.store(wire_ptr + row * size + scales + c, scale_code.to(tl.uint8), mask=(row < num_rows) & (c * BLOCK < num_k))
    words = pack(code, TOP, L_TILE, C, BLOCK) & tl.where(top >= EXPONENT, 0, -1)[:, :, None]
    num: tl.constexpr = BLOCK * (TOP + 1) // 32
    start = k0 * (TOP + 1) // 8
    if WORDS:
        w = start // 4 + tl.arange(0, C)[None, :, None] * num + tl.arange(0, num)[None, None, :]
        at = wire_ptr.to(tl.pointer_type(tl.int32)) + l * (size // 4) + w
        tl.store(at, words, mask=(l < num_rows) & (w < num_k * (TOP + 1) // 32))
    else:
        i = start + tl.arange(0, C)[None, :, None] * (4 * num) + tl.arange(0, 4 * num)[None, None, :]
        byte = bytes_of(words, L_TILE, C, num)
        tl.store(wire_ptr + l * size + i, byte, mask=(l < num_rows) & (i < num_k * (TOP + 1) // 8))


@triton.jit
def _decoded(
    wire_ptr,
    tensor_ptr,
    at,
    k0,
    num_k,
    size,
    scales,
    inside,
    NV: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return float32 (L, C, BLOCK) of the wire's rows `at`, int64 (L, 1, 1), where `inside`, (L, 1, 1)."""
    k = k0 + tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    row, here = tl.reshape(at, (L_TILE, 1)), tl.reshape(inside, (L_TILE, 1))
    if TOP == 3:
        i = k0 // 2 + tl.arange(0, C * BLOCK // 2)[None, :]
        byte = tl.load(wire_ptr + row * size + i, mask=here & (i < num_k // 2), other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte << 28, byte << 24), (L_TILE, C, BLOCK))
    else:
        code = tl.load(wire_ptr + at * size + k, mask=inside & (k < num_k), other=0).to(tl.int32) << 24
    c = k0 // BLOCK + tl.arange(0, C)[None, :]
    scale_code = tl.load(wire_ptr + row * size + scales + c, mask=here & (c * BLOCK < num_k), other=0).to(tl.int32)
    value = decode_tile(code, scale_code, NV, M, E, TOP)
    if NV:
        value = value * tl.load(tensor_ptr + row * (size // 4), mask=here, other=0.0)[:, :, None]
    if HADAMARD:
        value = inverse(value, SIGNS, HADAMARD, L_TILE, C, BLOCK)
    return value


@triton.jit
def decode_kernel(
    wire_ptr,
    tensor_ptr,
    index_ptr,
    out_ptr,
    num_rows,
    num_k,
    out_stride,
    size,
    scales,
    INDEXED: tl.constexpr,
    NV: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode one tile of rows of the wire into out[index]."""
    l0, k0 = tl.program_id(0).to(tl.int64) * L_TILE, tl.program_id(1) * C * BLOCK
    l = l0 + tl.arange(0, L_TILE)[:, None, None]
    k = k0 + tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    value = _decoded(
        wire_ptr, tensor_ptr, l, k0, num_k, size, scales, l < num_rows,
        NV, M, E, TOP, SIGNS, HADAMARD, L_TILE, C, BLOCK,
    )  # fmt: skip
    target = l
    if INDEXED:
        target = tl.load(index_ptr + l, mask=l < num_rows, other=0)
    at = out_ptr + target * out_stride + k
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=(l < num_rows) & (k < num_k))


@triton.jit
def move_kernel(
    x_ptr,
    source_ptr,
    out_ptr,
    target_ptr,
    num_rows,
    num_k,
    x_stride,
    out_stride,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    L_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    """Copy one tile of rows x[source] to out[target]."""
    l = tl.program_id(0).to(tl.int64) * L_TILE + tl.arange(0, L_TILE)[:, None]
    k = tl.program_id(1) * K_TILE + tl.arange(0, K_TILE)[None, :]
    inside = (l < num_rows) & (k < num_k)
    source, target = l, l
    if GATHER:
        source = tl.load(source_ptr + l, mask=l < num_rows, other=0)
    if SCATTER:
        target = tl.load(target_ptr + l, mask=l < num_rows, other=0)
    x = tl.load(x_ptr + source * x_stride + k, mask=inside)
    tl.store(out_ptr + target * out_stride + k, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    wire_ptr,
    tensor_ptr,
    kept_ptr,
    kept_rows_ptr,
    positions_ptr,
    weights_ptr,
    out_ptr,
    num_tokens,
    num_k,
    kept_stride,
    size,
    scales,
    kept_start,
    kept_stop,
    S: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CODED: tl.constexpr,
    NV: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the (weighted) rows of each token's S choices in order; see `ops.rows.sum_rows`. `size` counts elements."""
    k0 = tl.program_id(1) * C * BLOCK
    t = tl.program_id(0).to(tl.int64) * L_TILE + tl.arange(0, L_TILE)[:, None, None]
    k = k0 + tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    here, inside = t < num_tokens, (t < num_tokens) & (k < num_k)
    total = tl.zeros((L_TILE, C, BLOCK), tl.float32)
    for s in tl.static_range(S):
        position = tl.load(positions_ptr + t * S + s, mask=here, other=0)
        stays = (position >= kept_start) & (position < kept_stop)
        row = tl.load(kept_rows_ptr + position - kept_start, mask=here & stays, other=0)
        kept = tl.load(kept_ptr + row * kept_stride + k, mask=inside & stays, other=0.0)
        at = tl.where(position >= kept_stop, position - (kept_stop - kept_start), position)
        if CODED:
            far = _decoded(
                wire_ptr, tensor_ptr, at, k0, num_k, size, scales, here & (stays == 0),
                NV, M, E, TOP, SIGNS, HADAMARD, L_TILE, C, BLOCK,
            ).to(kept.dtype)  # fmt: skip
        else:
            far = tl.load(wire_ptr + at * size + k, mask=inside & (stays == 0), other=0.0)
        part = tl.where(stays, kept, far).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights_ptr + t * S + s, mask=here, other=0.0).to(tl.float32)
        total = part if s == 0 else total + part
    tl.store(out_ptr + t * num_k + k, total.to(out_ptr.dtype.element_ty), mask=inside)

"""Kernels over tiles in the layout of `ops.contract`: maxima for tensor scales, and quantization.

A tensor is seen as (A, B, L, K) with K the quantized dim, wherever that is in memory; A and B are batch dims of any
strides. A program works on one tile of L_TILE rows and C blocks.
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
from lightning_nvfp4.ops.triton.device.philox import random_at
from lightning_nvfp4.ops.triton.device.tiles import (
    block_tops,
    bytes_of,
    decode_tile,
    finite_top,
    inverse,
    load_blocks,
    pack,
    random_tile,
    round_tile,
    scales_of,
    transform,
)


@triton.jit
def amax_kernel(
    x_ptr,
    out_ptr,
    num_b,
    num_l,
    num_k,
    xsa,
    xsb,
    xsl,
    xsk,
    osa,
    osb,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Raise int32 magnitude bits of `out` to the largest finite element (after RHT) of each row, or of each batch.

    An output stride of zero reduces over that batch dim too. Each program walks STEPS tiles along K.
    """
    tiles_l = tl.cdiv(num_l, L_TILE)
    steps_k = tl.cdiv(num_k, STEPS * C * BLOCK)
    pid = tl.program_id(0)
    step = pid % steps_k
    tile_l = (pid // steps_k) % tiles_l
    batch = pid // (steps_k * tiles_l)
    a, b = batch // num_b, batch % num_b
    l = tile_l * L_TILE + tl.arange(0, L_TILE)[:, None, None]
    within = tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    top = tl.zeros((L_TILE,), tl.int32)
    for i in range(STEPS):
        k = (step * STEPS + i) * C * BLOCK + within
        at = x_ptr + a.to(tl.int64) * xsa + b.to(tl.int64) * xsb + l.to(tl.int64) * xsl + k.to(tl.int64) * xsk
        x = tl.load(at, mask=(l < num_l) & (k < num_k), other=0.0).to(tl.float32)
        if HADAMARD:
            x = transform(x, SIGNS, HADAMARD, L_TILE, C, BLOCK)
        top = tl.maximum(top, finite_top(x))
    out = out_ptr + a * osa + b * osb
    if PER_ROW:
        rows = tile_l * L_TILE + tl.arange(0, L_TILE)
        tl.atomic_max(out + rows, top, mask=rows < num_l)
    else:
        tl.atomic_max(out, tl.max(top, axis=0))


@triton.jit
def quantize_kernel(
    x_ptr,
    amax_ptr,
    sixth_ptr,
    tensor_ptr,
    codes_ptr,
    scale_ptr,
    values_ptr,
    seed_ptr,
    num_b,
    num_l,
    num_k,
    length,
    stored,
    num_c,
    count,
    xsa,
    xsb,
    xsl,
    xsk,
    msa,
    msb,
    msl,
    msc,
    vsa,
    vsb,
    vsl,
    vsk,
    BATCHED: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROW_AMAX: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    HAS_CODES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
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
    DRAW_AXIS: tl.constexpr,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROWS: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize one tile; see `launch.quantize` for the arguments. Grid: (batches x tiles of C, tiles of L)."""
    pid = tl.program_id(0)
    tile_c, batch = pid, pid - pid
    if BATCHED:
        tiles_c = tl.cdiv(num_c, C)
        tile_c, batch = pid % tiles_c, pid // tiles_c
    a, b = batch // num_b, batch % num_b
    l0, k0 = tl.program_id(1) * L_TILE, tile_c * C * BLOCK
    # int64 for the tile's place, int32 within it.
    base = a.to(tl.int64) * xsa + b.to(tl.int64) * xsb + l0.to(tl.int64) * xsl + k0.to(tl.int64) * xsk
    l = tl.arange(0, L_TILE)[:, None, None]
    k = tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    first = tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, 8)[None, None, :]
    c = tl.arange(0, C)[None, :]
    row = tl.arange(0, L_TILE)[:, None]
    # Whole tiles need no masks.
    row_inside = tl.full((1, 1), 1, tl.int1) if EVEN else l0 + row < num_l
    block_inside = row_inside if EVEN else row_inside & (k0 // BLOCK + c < num_c)
    inside = tl.full((1, 1, 1), 1, tl.int1) if EVEN else (l0 + l < num_l) & (k0 + k < num_k)
    if WHOLE:
        x = load_blocks(x_ptr + base + l * xsl + first, inside, L_TILE, C, BLOCK, 8).to(tl.float32)
    else:
        x = tl.load(x_ptr + base + l * xsl + k * xsk, mask=inside, other=0.0).to(tl.float32)
    if HADAMARD:
        x = transform(x, SIGNS, HADAMARD, L_TILE, C, BLOCK)
    top = block_tops(x, ROWS, L_TILE, C)
    sixth = 0.0
    decode = 0.0
    if ROW_AMAX:
        amax = as_float(finite_top(x))[:, None]
        encode = encode_tensor_scale(amax)
        sixth, decode = sixth_of(encode), reciprocal(encode)
        at = a * msa + b * msb + (l0 + row) * msl
        tl.store(amax_ptr + at, amax, mask=row_inside)
        tl.store(tensor_ptr + at, decode, mask=row_inside)
    elif NV:
        at = a * msa + b * msb + (l0 + row) * msl
        if PER_BLOCK:
            at = at + (k0 // BLOCK + c) * msc
            sixth = tl.load(sixth_ptr + at, mask=block_inside, other=0.0)
            decode = tl.load(tensor_ptr + at, mask=block_inside, other=0.0)
        else:
            sixth = tl.load(sixth_ptr + at, mask=row_inside, other=0.0)
            decode = tl.load(tensor_ptr + at, mask=row_inside, other=0.0)
    scale_code, scale, factor = scales_of(top, sixth, decode, NV, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    if SR == 0:
        random = as_bits(x)
    elif DRAW_AXIS == -1:
        added = count + (batch.to(tl.int64) * num_l + l0 + l) * (length - num_k) + (k0 + k - num_k)
        index = tl.where(k0 + k < num_k, base + l * xsl + k * xsk, added)
        random = random_at(tl.load(seed_ptr), index)
    else:
        random = random_tile(tl.load(seed_ptr), base, xsl, xsk, DRAW_AXIS, L_TILE, C, BLOCK)
    value, code = round_tile(x, factor, scale, random, M, E, MAX, TOP, SR, SATURATE)
    if HAS_VALUES:
        at = a.to(tl.int64) * vsa + b.to(tl.int64) * vsb + l0.to(tl.int64) * vsl + k0.to(tl.int64) * vsk
        at = values_ptr + at + l * vsl
        value = value.to(values_ptr.dtype.element_ty)
        inside = inside if EVEN else (l0 + l < num_l) & (k0 + k < length)
        tl.store(at + k * vsk, value, mask=inside)
    if HAS_CODES:
        line = batch.to(tl.int64) * num_l + l0
        at = scale_ptr + line * num_c + k0 // BLOCK + row * num_c + c
        tl.store(at, scale_code.to(tl.uint8), mask=block_inside)
        words = pack(code, TOP, L_TILE, C, BLOCK) & tl.where(top >= EXPONENT, 0, -1)[:, :, None]
        size: tl.constexpr = BLOCK * (TOP + 1) // 32
        start = k0 * (TOP + 1) // 8
        if WORDS:
            w = tl.arange(0, C)[None, :, None] * size + tl.arange(0, size)[None, None, :]
            at = codes_ptr + (line * stored + start) // 4 + l * (stored // 4) + w
            inside = inside if EVEN else (l0 + l < num_l) & (start // 4 + w < stored // 4)
            tl.store(at, words, mask=inside)
        else:
            byte = bytes_of(words, L_TILE, C, size)
            i = start + tl.arange(0, C)[None, :, None] * (4 * size) + tl.arange(0, 4 * size)[None, None, :]
            at = codes_ptr + line * stored + l * stored + i
            tl.store(at, byte.to(codes_ptr.dtype.element_ty, bitcast=True), mask=(l0 + l < num_l) & (i < stored))


@triton.jit
def decode_kernel(
    codes_ptr,
    scale_ptr,
    tensor_ptr,
    values_ptr,
    num_b,
    num_l,
    length,
    stored,
    num_c,
    tsa,
    tsb,
    tsl,
    tsc,
    vsa,
    vsb,
    vsl,
    vsk,
    HAS_TENSOR: tl.constexpr,
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
    """Decode one tile; see `launch.decode` for the arguments."""
    tiles_l = tl.cdiv(num_l, L_TILE)
    tiles_c = tl.cdiv(num_c, C)
    pid = tl.program_id(0)
    tile_c = pid % tiles_c
    tile_l = (pid // tiles_c) % tiles_l
    batch = pid // (tiles_l * tiles_c)
    a, b = batch // num_b, batch % num_b
    l0, k0 = tile_l * L_TILE, tile_c * C * BLOCK
    l = tl.arange(0, L_TILE)[:, None, None]
    k = tl.arange(0, C)[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    c = tl.arange(0, C)[None, :]
    row = tl.arange(0, L_TILE)[:, None]
    line = batch.to(tl.int64) * num_l + l0
    if TOP == 3:
        i = tl.arange(0, C * BLOCK // 2)[None, :]
        at = codes_ptr + (line + row) * stored + k0 // 2 + i
        byte = tl.load(at, mask=(l0 + row < num_l) & (k0 // 2 + i < stored), other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte << 28, byte << 24), (L_TILE, C, BLOCK))
    else:
        at = codes_ptr + (line + l) * stored + k0 + k
        code = tl.load(at, mask=(l0 + l < num_l) & (k0 + k < stored), other=0).to(tl.int32) << 24
    here = (l0 + row < num_l) & (k0 // BLOCK + c < num_c)
    scale_code = tl.load(scale_ptr + (line + row) * num_c + k0 // BLOCK + c, mask=here, other=0).to(tl.int32)
    value = decode_tile(code, scale_code, NV, M, E, TOP)
    if HAS_TENSOR:
        at = tensor_ptr + a * tsa + b * tsb + (l0 + row) * tsl + (k0 // BLOCK + c) * tsc
        value = value * tl.load(at, mask=here, other=0.0)[:, :, None]
    if HADAMARD:
        value = inverse(value, SIGNS, HADAMARD, L_TILE, C, BLOCK)
    at = values_ptr + a.to(tl.int64) * vsa + b.to(tl.int64) * vsb
    at = at + (l0 + l).to(tl.int64) * vsl + (k0 + k).to(tl.int64) * vsk
    tl.store(at, value.to(values_ptr.dtype.element_ty), mask=(l0 + l < num_l) & (k0 + k < length))


@triton.jit
def transform_kernel(
    x_ptr,
    out_ptr,
    num_b,
    num_l,
    num_k,
    length,
    xsa,
    xsb,
    xsl,
    xsk,
    osa,
    osb,
    osl,
    osk,
    SIGNS: tl.constexpr,
    HADAMARD: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
):
    """Write the random Hadamard transform of one tile, rounded to BF16 values."""
    tiles_l = tl.cdiv(num_l, L_TILE)
    tiles_c = tl.cdiv(length, C * HADAMARD)
    pid = tl.program_id(0)
    tile_l = pid % tiles_l
    tile_c = (pid // tiles_l) % tiles_c
    batch = pid // (tiles_l * tiles_c)
    a, b = (batch // num_b).to(tl.int64), (batch % num_b).to(tl.int64)
    l = (tile_l * L_TILE + tl.arange(0, L_TILE)[:, None, None]).to(tl.int64)
    within = tl.arange(0, C)[None, :, None] * HADAMARD + tl.arange(0, HADAMARD)[None, None, :]
    k = (tile_c * C * HADAMARD + within).to(tl.int64)
    at = x_ptr + a * xsa + b * xsb + l * xsl + k * xsk
    x = tl.load(at, mask=(l < num_l) & (k < num_k), other=0.0).to(tl.float32)
    y = transform(x, SIGNS, HADAMARD, L_TILE, C, HADAMARD)
    tl.store(out_ptr + a * osa + b * osb + l * osl + k * osk, y, mask=(l < num_l) & (k < length))


@triton.jit
def tensor_scales_kernel(amax_ptr, sixth_ptr, decode_ptr, count, BLOCK: tl.constexpr):
    """Write `sixth_of` the encode tensor scales, and the decode tensor scales, of amaxes."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    encode = encode_tensor_scale(tl.load(amax_ptr + i, mask=i < count, other=0.0))
    tl.store(sixth_ptr + i, sixth_of(encode), mask=i < count)
    tl.store(decode_ptr + i, reciprocal(encode), mask=i < count)

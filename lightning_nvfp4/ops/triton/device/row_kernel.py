"""Quantization to packed codes along the rows of memory, where a thread holds whole blocks.

A block is a tuple with one tensor (L, C) of L rows of C blocks for each of its elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.blocks import (
    halves_apart,
    largest,
    largest_of_pairs,
    taken_apart,
    together,
    words_of_blocks,
)
from lightning_nvfp4.ops.triton.device.elements import EXPONENT
from lightning_nvfp4.ops.triton.device.tiles import load_blocks, scales_of, tile_tops


@triton.jit
def rows_kernel(
    x_ptr,
    sixth_ptr,
    tensor_ptr,
    codes_ptr,
    scale_ptr,
    seed_ptr,
    num_l,
    num_c,
    msb,
    msl,
    msc,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    L_TILE: tl.constexpr,
    C: tl.constexpr,
):
    """Quantize C blocks of each of L_TILE rows of x (B, L, K); see `launch.quantize`.

    PAIRS: x is BF16, read two elements at a time. Grid: (tiles of C, tiles of L, B).
    """
    c0, l0, b = tl.program_id(0) * C, tl.program_id(1) * L_TILE, tl.program_id(2).to(tl.int64)
    l, c = tl.arange(0, L_TILE)[:, None], tl.arange(0, C)[None, :]
    inside = tl.full((1, 1), 1, tl.int1) if EVEN else (l0 + l < num_l) & (c0 + c < num_c)  # whole tiles need no masks
    block = (b * num_l + l0) * num_c + c0  # of all blocks, the tile's first
    within = l * num_c + c
    if PAIRS:
        at = x_ptr.to(tl.pointer_type(tl.int32)) + block * (BLOCK // 2) + (within * (BLOCK // 2))[:, :, None]
        x = load_blocks(at + tl.arange(0, 4)[None, None, :], inside[:, :, None], L_TILE, C, BLOCK // 2, 4)
        pairs = taken_apart(x, L_TILE, C, BLOCK // 2)
        tops = largest_of_pairs(pairs)
        top = tl.maximum(tops & -0x10000, tops << 16)
        elements = halves_apart(pairs)
    else:
        at = x_ptr + block * BLOCK + (within * BLOCK)[:, :, None]
        x = load_blocks(at + tl.arange(0, 8)[None, None, :], inside[:, :, None], L_TILE, C, BLOCK, 8).to(tl.float32)
        elements = taken_apart(x, L_TILE, C, BLOCK)
        top = largest(elements)
    top = tile_tops(top, ROWS, L_TILE, C)
    sixth = 0.0
    decode = 0.0
    if NV:
        if ONE_TENSOR:
            sixth, decode = tl.load(sixth_ptr + b * msb), tl.load(tensor_ptr + b * msb)
        else:
            tensor_at = b * msb + (l0 + l) * msl + (c0 + c) * msc
            sixth = tl.load(sixth_ptr + tensor_at, mask=inside, other=0.0)
            decode = tl.load(tensor_ptr + tensor_at, mask=inside, other=0.0)
    scale_code, _, factor = scales_of(top, sixth, decode, NV, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)
    tl.store(scale_ptr + block + within, scale_code.to(tl.uint8), mask=inside)
    seed = tl.load(seed_ptr)
    words = words_of_blocks(
        elements, factor, seed, (block + within) * BLOCK, M, E, MAX, TOP, SR, SATURATE, NATIVE
    )  # fmt: skip
    size: tl.constexpr = BLOCK * (TOP + 1) // 32
    word = together(words, L_TILE, C) & tl.where(top >= EXPONENT, 0, -1)[:, :, None]
    at = codes_ptr + block * size + (within * size)[:, :, None] + tl.arange(0, size)[None, None, :]
    tl.store(at, word, mask=inside[:, :, None])

"""Grouped GEMMs on decoded operands: BF16 tensor cores, FP32 accumulation, tensor scales in the FP32 epilogue.

Rows are sorted by expert; `offsets` (E + 1) on the device says where each expert's begin, so the host never waits for
a count. Programs stay on their multiprocessor and walk over tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import INTERPRETED


@triton.jit
def _swizzle(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Return tile coordinates, columns of GROUP_M tiles at a time, so that tiles in flight share operands."""
    width = GROUP_M * num_n
    group = tile // width
    first = group * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    within = tile % width
    return first + within % height, within // height


@triton.jit
def _dot(a, b, acc):
    """Multiply BF16 tiles into an FP32 accumulator; Triton's interpreter has no BF16 product."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def scaled(acc, row, column):
    """Return acc * row * column as `ops.gemm.apply_tensor_scales` orders the products."""
    # A column scale that varies makes both factors as large as the tile: in registers only where it must be.
    across = (row >= 1.0) != (column >= 1.0)
    return (acc * tl.where(across, row * column, row)) * tl.where(across, 1.0, column)


@triton.jit
def rows_kernel(
    a_desc,
    b_desc,
    c_ptr,
    offsets_ptr,
    row_ptr,
    column_ptr,
    bias_ptr,
    num_experts,
    N,
    K,
    row_stride,
    column_stride_e,
    column_stride_n,
    TRANSPOSED: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    E_POWER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Rows of A times the matrix of their expert: C[r, n] = sum over k of A[r, k] * B[e, n, k].

    B is (E, N, K), or (E, K, N) unless TRANSPOSED.
    SCALES bit 0: a scale per row; bit 1: one per expert; bit 2: one per expert and column.
    """
    e = tl.arange(0, E_POWER)
    begin = tl.load(offsets_ptr + e, mask=e < num_experts, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < num_experts, other=0)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    last = tl.cumsum(tiles, axis=0)
    num_m = tl.sum(tiles, axis=0)
    num_n = tl.cdiv(N, BLOCK_N)
    num_k = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        m, n = _swizzle(tile, num_m, num_n, GROUP_M)
        expert = tl.sum((last <= m).to(tl.int32), axis=0)
        mine = e == expert
        row0 = tl.sum(tl.where(mine, begin + (m - last + tiles) * BLOCK_M, 0), axis=0)
        stop = tl.sum(tl.where(mine, end, 0), axis=0)
        n0 = n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.range(num_k):
            a = a_desc.load([row0, i * BLOCK_K])
            if TRANSPOSED:
                b = tl.reshape(b_desc.load([expert, n0, i * BLOCK_K]), (BLOCK_N, BLOCK_K))
                acc = _dot(a, b.T, acc)
            else:
                b = tl.reshape(b_desc.load([expert, i * BLOCK_K, n0]), (BLOCK_K, BLOCK_N))
                acc = _dot(a, b, acc)
        rows = row0 + tl.arange(0, BLOCK_M)
        columns = n0 + tl.arange(0, BLOCK_N)
        if SCALES > 0:
            row = tl.full((BLOCK_M, 1), 1.0, tl.float32)
            column = tl.full((1, 1), 1.0, tl.float32)
            if SCALES & 1:
                row = tl.load(row_ptr + rows * row_stride, mask=rows < stop, other=1.0)[:, None]
            if SCALES & 4:
                at = column_ptr + expert * column_stride_e + columns * column_stride_n
                column = tl.load(at, mask=columns < N, other=1.0)[None, :]
            elif SCALES & 2:
                column = tl.load(column_ptr + expert * column_stride_e + tl.zeros((1, 1), tl.int32))
            acc = scaled(acc, row, column)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + expert * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        at = c_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, acc.to(c_ptr.dtype.element_ty), mask=(rows < stop)[:, None] & (columns < N)[None, :])


@triton.jit
def tokens_kernel(
    a_desc,
    b_desc,
    a_ptr,
    b_ptr,
    c_ptr,
    offsets_ptr,
    row_ptr,
    column_ptr,
    num_experts,
    N,
    K,
    a_stride,
    b_stride,
    row_stride_e,
    row_stride_n,
    column_stride_e,
    column_stride_k,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_N: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Products over the rows of each expert: C[e, n, k] = sum over its r of A[r, n] * B[r, k].

    SCALES bit 0: scales (e, n) of A's columns; of B's columns bit 1: one per expert, bit 2: (e, k).
    """
    num_n, num_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    per_expert = num_n * num_k
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, NUM_PROGRAMS):
        expert = tile // per_expert
        n, k = _swizzle(tile % per_expert, num_n, num_k, GROUP_N)
        n0, k0 = n * BLOCK_N, k * BLOCK_K
        begin = tl.load(offsets_ptr + expert)
        end = tl.load(offsets_ptr + expert + 1)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        whole = (end - begin) // BLOCK_R
        for i in tl.range(whole):
            a = a_desc.load([begin + i * BLOCK_R, n0])
            b = b_desc.load([begin + i * BLOCK_R, k0])
            acc = _dot(a.T, b, acc)
        columns_n = n0 + tl.arange(0, BLOCK_N)
        columns_k = k0 + tl.arange(0, BLOCK_K)
        if begin + whole * BLOCK_R < end:
            # The rest of the rows: those of the next expert must not come in.
            rows = begin + whole * BLOCK_R + tl.arange(0, BLOCK_R)
            inside = (rows < end)[:, None]
            at = rows.to(tl.int64)[:, None]
            a = tl.load(a_ptr + at * a_stride + columns_n[None, :], mask=inside & (columns_n < N)[None, :], other=0.0)
            b = tl.load(b_ptr + at * b_stride + columns_k[None, :], mask=inside & (columns_k < K)[None, :], other=0.0)
            acc = _dot(a.T, b, acc)
        if SCALES > 0:
            row = tl.full((BLOCK_N, 1), 1.0, tl.float32)
            column = tl.full((1, 1), 1.0, tl.float32)
            if SCALES & 1:
                at = row_ptr + expert * row_stride_e + columns_n * row_stride_n
                row = tl.load(at, mask=columns_n < N, other=1.0)[:, None]
            if SCALES & 4:
                at = column_ptr + expert * column_stride_e + columns_k * column_stride_k
                column = tl.load(at, mask=columns_k < K, other=1.0)[None, :]
            elif SCALES & 2:
                column = tl.load(column_ptr + expert * column_stride_e + tl.zeros((1, 1), tl.int32))
            acc = scaled(acc, row, column)
        at = c_ptr + expert.to(tl.int64) * N * K + columns_n.to(tl.int64)[:, None] * K + columns_k[None, :]
        tl.store(at, acc.to(c_ptr.dtype.element_ty), mask=(columns_n < N)[:, None] & (columns_k < K)[None, :])

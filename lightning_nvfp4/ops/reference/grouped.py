"""Grouped GEMMs as loops over experts."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.ops.epilogue import apply_tensor_scales
from lightning_nvfp4.ops.groups import Groups


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return the float32 product of two operands: on CUDA of BF16 ones, with FP32 accumulation."""
    if a_MK.is_cuda:
        return torch.mm(a_MK.to(torch.bfloat16), b_KN.to(torch.bfloat16), out_dtype=torch.float32)
    return a_MK.to(torch.float32) @ b_KN.to(torch.float32)


def rows(
    a_RK: Tensor,
    b: Tensor,
    groups: Groups,
    transposed: bool,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Implement `ops.gemm.rows_matmul`."""
    counts = groups.on_host()
    parts = a_RK.split(list(counts))
    products = [product(part, b[e].T if transposed else b[e]) for e, part in enumerate(parts) if len(part)]
    num_n = b.shape[1] if transposed else b.shape[2]
    y_RN = torch.cat(products) if products else a_RK.new_zeros(0, num_n, dtype=torch.float32)
    per_row = None if column_scale is None else _spread(column_scale, groups, len(y_RN))
    y_RN = apply_tensor_scales(y_RN, row_scale, per_row)
    return (y_RN if bias_EN is None else y_RN + _spread(bias_EN.float(), groups, len(y_RN))).to(dtype)


def tokens(a_RN: Tensor, b_RK: Tensor, groups: Groups, row_scale: Tensor | None, column_scale: Tensor | None) -> Tensor:
    """Implement `ops.gemm.tokens_matmul`."""
    out = torch.empty(groups.num, a_RN.shape[1], b_RK.shape[1], dtype=torch.float32, device=a_RN.device)
    counts = groups.on_host()
    start = 0
    for e, count in enumerate(counts):
        part = slice(start, start + count)
        rows = None if row_scale is None else row_scale[e % len(row_scale), :, None]
        columns = None if column_scale is None else column_scale[e % len(column_scale)]
        out[e] = apply_tensor_scales(product(a_RN[part].T, b_RK[part]), rows, columns)
        start += count
    return out


def _spread(per_expert: Tensor, groups: Groups, num_rows: int) -> Tensor:
    """Repeat a row per expert (E or 1, n) to one per row (R, n)."""
    if len(per_expert) == 1:
        return per_expert
    return per_expert[groups.expert_of(torch.arange(num_rows, device=per_expert.device))]

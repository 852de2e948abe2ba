"""The epilogue of an emulated GEMM."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_tensor_scales(product: Tensor, row: Tensor | None, column: Tensor | None) -> Tensor:
    """Return float32 product * row * column, with no overflow or underflow that the result does not have.

    A scale above one and one below it are multiplied first: their product lies between them. Two scales on one side of
    one follow each other: what leaves the range after the first is out of it after the second.

    Args:
        product: float32 (M, N).
        row: float32, broadcastable to (M, 1), or ``None``.
        column: float32, broadcastable to (M, N), or ``None``.
    """
    if row is None or column is None:
        scale = row if column is None else column
        return product if scale is None else product * scale
    across = (row >= 1) != (column >= 1)
    return product * torch.where(across, row * column, row) * torch.where(across, 1.0, column)

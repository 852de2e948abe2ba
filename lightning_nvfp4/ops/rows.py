"""Rows of matrices: moved from place to place, and summed by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.ops.backends import has_kernels, kernels


def move_rows(x: Tensor, source: Tensor | None, out: Tensor, target: Tensor | None) -> None:
    """Copy rows: ``out[target] = x[source]``, converted to the dtype of `out`.

    Args:
        x: (.., D).
        source: int64 (n,) rows of x; all of them in order if ``None``.
        out: (.., D).
        target: int64 (n,) rows of `out`, each at most once; all of them in order if ``None``.
    """
    if has_kernels(x, "auto") and kernels().moves(x) and kernels().moves(out):
        kernels().move_rows(x, source, out, target)
        return
    rows = x if source is None else x[source]
    if target is None:
        out.copy_(rows)
    else:
        out.index_copy_(0, target, rows.to(out.dtype))


class TokenSum(NamedTuple):
    """The sum over each of T tokens' S choices (T, D), added in FP32 in their order.

    Attributes:
        kept: (.., D), rows that stayed.
        kept_rows: int64, which rows of `kept`.
        positions: int64 (T * S,), the position of each choice's row in the sequence of all.
        kept_positions: those that are the rows ``kept[kept_rows]``; around them are the rows that arrived.
        weights: (T, S) factors, applied in FP32.
        num_choices: S.
        dtype: of the result.
    """

    kept: Tensor
    kept_rows: Tensor
    positions: Tensor
    kept_positions: slice
    weights: Tensor | None
    num_choices: int
    dtype: torch.dtype


def sum_rows(rows: Tensor, total: TokenSum) -> Tensor | None:
    """Return the sum with the arrived `rows` (.., D) of the dtype of `kept`; ``None`` without a kernel for it."""
    if has_kernels(total.kept, "auto") and kernels().moves(total.kept) and kernels().moves(rows):
        return kernels().sum_rows(rows, None, total)
    return None

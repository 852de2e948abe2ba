"""Rows of matrices: moved from place to place, and summed by token."""

from __future__ import annotations

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
    if has_kernels(x, "auto") and kernels().moves(x, out):
        kernels().move_rows(x, source, out, target)
        return
    rows = x if source is None else x[source]
    if target is None:
        out.copy_(rows)
    else:
        out.index_copy_(0, target, rows.to(out.dtype))


def sum_rows(
    rows: Tensor, kept: Tensor, kept_rows: Tensor, places: Tensor, num_choices: int, weights: Tensor | None
) -> Tensor | None:
    """Return the sum over each token's choices (T, D) float32, added in their order; ``None`` without a kernel for it.

    Args:
        rows: (.., D), of the dtype of `kept`.
        kept: (.., D).
        kept_rows: int64 rows of `kept`.
        places: int64 (T * S,), for each choice i a row of `rows`, or -1 - i for the row ``kept_rows[i]`` of `kept`.
        num_choices: S.
        weights: (T, S) factors, applied in FP32.
    """
    if has_kernels(kept, "auto") and kernels().moves(kept, rows):
        return kernels().sum_rows(rows, None, kept, kept_rows, places, num_choices, weights)
    return None

"""Quantized rows as bytes for a wire: of each row its codes, block scales and tensor scale, next to each other.

A row is quantized by itself, so its bytes mean the same wherever they go.

Shapes: R rows, D columns, B bytes of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats.block import BLOCK_FORMATS
from lightning_nvfp4.formats.element import ELEMENTS, S2F6
from lightning_nvfp4.formats.rounding import NEAREST
from lightning_nvfp4.ops.backends import has_kernels, kernels
from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.layout import ceil_div, num_blocks, stored_length
from lightning_nvfp4.ops.rows import TokenSum
from lightning_nvfp4.ops.select import quantize
from lightning_nvfp4.recipe import QuantSpec

_ALIGNMENT = 16
"""Bytes that one load takes; rows of a hundred times as many and more are padded to a multiple."""


class RowLayout(NamedTuple):
    """Where the bytes of a row are: codes from 0, then block scales, the tensor scale, and padding up to `size`."""

    scales: int
    tensor: int
    end: int
    size: int


def row_layout(spec: QuantSpec, num_columns: int) -> RowLayout:
    """Return the layout of a row of `num_columns` elements.

    Raises:
        UserError: a format whose rows do not stand by themselves.
    """
    if spec.block is None or spec.block[0] != 1 or spec.tensor_scale == "tensor" or spec.rounding != NEAREST:
        raise UserError(
            f"{spec} does not quantize each row by itself: for a wire take blocks of one row, tensor_scale='row' "
            "(nvfp4) and rounding='nearest'."
        )
    scales = ceil_div(stored_length(num_columns, spec), BLOCK_FORMATS[spec.format].codes_per_byte)
    tensor = scales + num_blocks(num_columns, spec)
    end = tensor + (4 if spec.tensor_scale == "row" else 0)
    size = ceil_div(end, _ALIGNMENT) * _ALIGNMENT if end >= 100 * _ALIGNMENT else end
    return RowLayout(scales, tensor, end, size)


def encode_rows(x_RD: Tensor, spec: QuantSpec, index: Tensor | None = None) -> Tensor:
    """Return the bytes uint8 (R, B) of the rows of x, or of ``x[index]``.

    Args:
        x_RD: any floating-point dtype.
        spec: see `row_layout`.
        index: int64 (R,), rows of x.
    """
    layout = row_layout(spec, x_RD.shape[1])
    if _by_kernels(x_RD, x_RD, spec, layout):
        return kernels().encode_rows(x_RD, spec, index, layout.scales, layout.tensor, layout.size)
    q = quantize(x_RD if index is None else x_RD[index], spec)
    parts = [q.codes.view(torch.uint8), q.block_scale]
    if q.tensor_scale is not None:
        parts.append(q.tensor_scale.view(torch.uint8))
    parts.append(q.block_scale.new_zeros(len(q.codes), layout.size - layout.end))
    return torch.cat(parts, dim=1)


def quantized_rows(wire_RB: Tensor, spec: QuantSpec, num_columns: int) -> QuantizedTensor:
    """Return the rows as `quantize` returned them; the amax, which is not sent, is ``None``."""
    layout = row_layout(spec, num_columns)
    codes = _copied(wire_RB[:, : layout.scales])
    tensor_scale = None
    if spec.tensor_scale == "row":
        tensor_scale = _copied(wire_RB[:, layout.tensor : layout.end]).view(torch.float32)
    return QuantizedTensor(
        codes.view(torch.int8) if ELEMENTS[spec.element or ""] is S2F6 else codes,
        _copied(wire_RB[:, layout.scales : layout.tensor]),
        tensor_scale,
        None,
        spec,
        (len(wire_RB), num_columns),
        1,
    )


def _copied(part: Tensor) -> Tensor:
    """Return the part in memory of its own, aligned for any dtype."""
    return part.clone(memory_format=torch.contiguous_format)


def decode_rows(wire_RB: Tensor, spec: QuantSpec, out: Tensor, index: Tensor | None = None) -> None:
    """Decode the rows into the rows of `out` (.., D) of any floating-point dtype, or into ``out[index]``."""
    layout = row_layout(spec, out.shape[1])
    if _by_kernels(wire_RB, out, spec, layout):
        kernels().decode_rows(wire_RB, spec, out, index, layout.scales, layout.tensor, layout.size)
        return
    values = quantized_rows(wire_RB, spec, out.shape[1]).dequantize(out.dtype)
    if index is None:
        out.copy_(values)
    else:
        out.index_copy_(0, index, values)


def sum_rows(wire_RB: Tensor, spec: QuantSpec, total: TokenSum) -> Tensor | None:
    """Decode, and sum by token as `ops.rows.sum_rows`; ``None`` without a kernel for it."""
    layout = row_layout(spec, total.kept.shape[1])
    if not _by_kernels(wire_RB, total.kept, spec, layout):
        return None
    return kernels().sum_rows(wire_RB, (spec, layout.scales, layout.tensor, layout.size), total)


def _by_kernels(on: Tensor, matrix: Tensor, spec: QuantSpec, layout: RowLayout) -> bool:
    return has_kernels(on, "auto") and kernels().wires(matrix, spec, layout.tensor, layout.size)

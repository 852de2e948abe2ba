"""Host side of the wire's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.ops.layout import ceil_div, num_blocks
from lightning_nvfp4.ops.rows import TokenSum
from lightning_nvfp4.ops.triton.device import wire_kernel as kernels
from lightning_nvfp4.ops.triton.geometry import DTYPES, constants_of, given, power_of_two, uncovered, warps_of
from lightning_nvfp4.ops.triton.launch import MAX_ROW
from lightning_nvfp4.ops.triton.runtime import launch
from lightning_nvfp4.recipe import QuantSpec

_DTYPES = frozenset((*DTYPES, torch.uint8))
_TILE = 4096
"""Elements of a tile."""
_RUN = 1024
"""Elements of a row in a tile."""
_DECODE = ("NV", "M", "E", "TOP", "SIGNS", "HADAMARD", "BLOCK")
_ENCODE = (*_DECODE, "MAX", "RECIPROCAL", "MAX_EXPONENT", "RULE", "ZERO", "SATURATE")


def moves(x: Tensor) -> bool:
    """Return whether the kernels can read and write rows of x."""
    return x.ndim == 2 and x.stride(1) == 1 and x.dtype in _DTYPES


def wires(x: Tensor, spec: QuantSpec, tensor: int, size: int) -> bool:
    """Return whether the kernels can code rows of a matrix: whole blocks, aligned scales, rows that fit a program."""
    whole = spec.block is not None and x.shape[1] % max(spec.block[1], spec.hadamard or 1) == 0
    aligned = spec.format != "nvfp4" or (tensor % 4 == 0 and size % 4 == 0 and x.shape[1] <= MAX_ROW)
    return moves(x) and whole and aligned and uncovered(spec) is None and x.shape[1] > 0


def encode_rows(x: Tensor, spec: QuantSpec, index: Tensor | None, scales: int, tensor: int, size: int) -> Tensor:
    """Implement `ops.wire.encode_rows` for a row layout (scales, tensor, size)."""
    num_rows = x.shape[0] if index is None else index.shape[0]
    wire = torch.empty(num_rows, size, dtype=torch.uint8, device=x.device)
    if not num_rows:
        return wire
    constants = constants_of(spec)
    rows, c = _tile(spec, x.shape[1], whole_rows=constants["NV"])
    launch(
        kernels.encode_kernel, _grid(num_rows, rows, num_blocks(x.shape[1], spec), c), x,
        x, given(index, x), wire, _tensor_scales(wire, spec, tensor), num_rows, x.shape[1], x.stride(0), size, scales,
        INDEXED=index is not None, WHOLE=constants["BLOCK"] <= 32 and x.shape[1] % (c * constants["BLOCK"]) == 0,
        WORDS=size % 4 == 0, **{name: constants[name] for name in _ENCODE},
        L_TILE=rows, C=c, num_warps=warps_of(rows * c * constants["BLOCK"]),
    )  # fmt: skip
    return wire


def decode_rows(
    wire: Tensor, spec: QuantSpec, out: Tensor, index: Tensor | None, scales: int, tensor: int, size: int
) -> None:
    """Implement `ops.wire.decode_rows`."""
    if not wire.shape[0]:
        return
    constants = constants_of(spec)
    rows, c = _tile(spec, out.shape[1], whole_rows=False)
    launch(
        kernels.decode_kernel, _grid(wire.shape[0], rows, num_blocks(out.shape[1], spec), c), wire,
        wire, _tensor_scales(wire, spec, tensor), given(index, wire), out, wire.shape[0], out.shape[1], out.stride(0),
        size, scales, INDEXED=index is not None, **{name: constants[name] for name in _DECODE},
        L_TILE=rows, C=c, num_warps=warps_of(rows * c * constants["BLOCK"]),
    )  # fmt: skip


def move_rows(x: Tensor, source: Tensor | None, out: Tensor, target: Tensor | None) -> None:
    """Implement `ops.rows.move_rows`."""
    num_rows = (x if source is None else source).shape[0]
    if not num_rows:
        return
    run = min(power_of_two(x.shape[1]), 2 * _RUN)
    rows = max(1, 2 * _TILE // run)
    launch(
        kernels.move_kernel, (ceil_div(num_rows, rows), ceil_div(x.shape[1], run)), x,
        x, given(source, x), out, given(target, x), num_rows, x.shape[1], x.stride(0), out.stride(0),
        GATHER=source is not None, SCATTER=target is not None, L_TILE=rows, K_TILE=run, num_warps=8,
    )  # fmt: skip


def sum_rows(rows: Tensor, coded: tuple[QuantSpec, int, int, int] | None, total: TokenSum) -> Tensor:
    """Implement `ops.rows.sum_rows`; of `ops.wire.sum_rows`, whose rows are `coded`: (format, scales, tensor, size)."""
    kept, kept_rows, positions, kept_positions, weights, num_choices, dtype = total
    num_tokens, num_k = positions.shape[0] // num_choices, kept.shape[1]
    out = torch.empty(num_tokens, num_k, dtype=dtype, device=kept.device)
    if not num_tokens:
        return out
    spec = coded[0] if coded else QuantSpec("s2f6")
    constants = constants_of(spec)
    scales, size, tensor_scales = 0, rows.stride(0), rows
    if coded:
        _, scales, tensor, size = coded
        tensor_scales = _tensor_scales(rows, spec, tensor)
    tile, c = _tile(spec, num_k, whole_rows=False)
    tile = max(1, tile // 2)  # of both kinds of rows, and the sum
    weights = None if weights is None else weights.contiguous()
    launch(
        kernels.sum_kernel, _grid(num_tokens, tile, ceil_div(num_k, constants["BLOCK"]), c), kept,
        rows, tensor_scales, kept, kept_rows, positions, given(weights, kept), out, num_tokens, num_k,
        kept.stride(0), size, scales, kept_positions.start, kept_positions.stop,
        S=num_choices, WEIGHTED=weights is not None, CODED=coded is not None,
        **{name: constants[name] for name in _DECODE}, L_TILE=tile, C=c,
        num_warps=warps_of(tile * c * constants["BLOCK"]),
    )  # fmt: skip
    return out


def _tile(spec: QuantSpec, num_k: int, whole_rows: bool) -> tuple[int, int]:
    """Return rows and blocks of a tile."""
    assert spec.block is not None
    length, blocks = spec.block[1], power_of_two(num_blocks(num_k, spec))
    least = max(1, (spec.hadamard or 1) // length)
    c = max(least, blocks if whole_rows else min(blocks, _RUN // length))
    return max(1, _TILE // (c * length)), c


def _grid(num_rows: int, rows: int, num_c: int, c: int) -> tuple[int, int]:
    return ceil_div(num_rows, rows), ceil_div(num_c, c)


def _tensor_scales(wire: Tensor, spec: QuantSpec, tensor: int) -> Tensor:
    """Return the float32 tensor scales in the wire's rows, or, for formats without, anything."""
    if spec.format != "nvfp4":
        return wire
    return wire.view(torch.float32)[:, tensor // 4 :] if wire.shape[0] else wire

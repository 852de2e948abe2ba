"""How the kernels see a tensor: sizes and strides, the constants of a format, and the size of a tile."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.formats.block import BLOCK_FORMATS, HADAMARD_SIGNS
from lightning_nvfp4.formats.element import ELEMENTS, S2F6
from lightning_nvfp4.formats.rounding import STOCHASTIC
from lightning_nvfp4.ops.layout import block_of, ceil_div, num_blocks
from lightning_nvfp4.ops.triton.runtime import INTERPRETED
from lightning_nvfp4.recipe import QuantSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIGN_PERIOD = 16
MAX_GRID = 65535
"""Most programs of a grid in its second and third dimension."""
_TILE = 1024 if INTERPRETED else 4096
"""Elements of a tile; the interpreter, which works on elements that are not there too, has small tiles throughout."""


def uncovered(spec: QuantSpec) -> str | None:
    """Return why the kernels cannot run a format, or ``None``."""
    if spec.four_over_six:
        return "four_over_six adds errors in sequence and has no kernel"
    if spec.hadamard and spec.hadamard_signs and _SIGN_PERIOD % len(spec.hadamard_signs):
        return f"hadamard_signs of {len(spec.hadamard_signs)} entries have no kernel, only of up to {_SIGN_PERIOD}"
    return None


class View(NamedTuple):
    """A tensor as (A, B, L, K): sizes and element strides; K is the quantized dim."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]


@functools.lru_cache(4096)
def view(shape: tuple[int, ...], dim: int, stride: tuple[int, ...] | None = None) -> View:
    """Return the view of a contiguous tensor (or of a tensor of up to three dims with any strides)."""
    before, after, length = shape[:dim], shape[dim + 1 :], shape[dim]
    if stride is not None and len(shape) <= 3:
        rest = [(n, s) for d, (n, s) in enumerate(zip(shape, stride, strict=True)) if d != dim]
        (outer, so), (nl, sl) = [(1, 0)] * (2 - len(rest)) + rest
        if dim == 0:
            return View((1, outer, nl, length), (0, so, sl, stride[dim]))
        return View((outer, 1, nl, length), (so, 0, sl, stride[dim]))
    if not after:
        rows = before[-1] if before else 1
        return View((math.prod(before[:-1]), 1, rows, length), (rows * length, 0, length, 1))
    inner = math.prod(after)
    return View((math.prod(before), inner // after[-1], after[-1], length), (length * inner, after[-1], 1, inner))


@functools.cache
def constants_of(spec: QuantSpec) -> dict[str, Any]:
    """Return the constexprs of a format."""
    element, block = ELEMENTS[spec.element or ""], BLOCK_FORMATS[spec.format]
    signs = spec.hadamard_signs or HADAMARD_SIGNS
    repeated = signs * (_SIGN_PERIOD // len(signs))
    nv = spec.format == "nvfp4"
    rule = 0 if spec.scale_rule == "floor" else 1 if spec.format == "mxfp8" else 2
    return {
        "NV": nv,
        "M": -1 if element is S2F6 else element.mantissa_bits,
        "E": 0 if element is S2F6 else element.min_exponent,
        "MAX": _float_bits(element.max),
        "RECIPROCAL": 1.0 / element.max,
        "MAX_EXPONENT": element.max_exponent,
        "TOP": element.bits - 1,
        "RULE": rule,
        "ZERO": block.zero_block_scale,
        "SR": spec.sr_bits if spec.rounding == STOCHASTIC else 0,
        # A scale that is rounded up leaves nothing to saturate but what stochastic rounding lifts.
        "SATURATE": nv or rule == 0 or spec.rounding == STOCHASTIC,
        "SIGNS": sum(1 << i for i, sign in enumerate(repeated) if sign < 0),
        "HADAMARD": spec.hadamard or 0,
        "ROWS": block_of(spec)[0],
        "BLOCK": block_of(spec)[1],
    }


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(4096)
def tile_of(spec: QuantSpec, v: View, codes: bool) -> tuple[int, int]:
    """Return rows and blocks of a tile: long runs of memory in what is read, and in codes where they are written."""
    rows, length = block_of(spec)
    blocks = num_blocks(v.sizes[3], spec)
    least = max(1, (spec.hadamard or 1) // length)
    width = _TILE // rows if v.strides[3] == 1 else 64 if codes else 32
    c = max(least, min(power_of_two(blocks), width // length))
    return max(rows, min(power_of_two(v.sizes[2]), _TILE // (c * length))), c


def whole_blocks(spec: QuantSpec, v: View) -> bool:
    """Return whether a thread can hold whole blocks, of two or four vectors of memory; see `tiles.load_blocks`."""
    return v.strides[3] == 1 and block_of(spec)[1] in (16, 32)


def row_tile(spec: QuantSpec, num_l: int) -> tuple[int, int, int]:
    """Return rows, blocks and warps of a tile of `rows_kernel`."""
    rows, length = block_of(spec)
    if INTERPRETED:
        tile, c, warps = max(rows, 2), 4, 1
    elif rows > 1:
        tile, c, warps = rows, 512 // rows, 4
    else:
        tile, c, warps = 1, *((64, 1) if length == 16 else (256, 4))
    while ceil_div(num_l, tile) > MAX_GRID:
        tile *= 2
    return tile, c, warps


def column_tile(spec: QuantSpec, codes: bool) -> tuple[int, int, int, int | None]:
    """Return columns, blocks, warps and most registers of a tile of `columns_kernel`.

    With codes, lines of at least 64 bytes along K. Fewer registers than the compiler would take leave room for more
    programs on a multiprocessor.
    """
    stochastic = spec.rounding == STOCHASTIC
    if INTERPRETED:
        return (32, 2 if codes else 1, 1, None)
    if not codes:
        return (256, 1, 2, 128) if stochastic else (512, 1, 4, 128)
    if block_of(spec)[1] == 16:
        return (128, 8, 8, 128) if stochastic else (64, 16, 8, None)
    return (64, 4, 2, None) if stochastic else (64, 4, 4, None)


def down_columns(spec: QuantSpec, v: View) -> bool:
    """Return whether `columns_kernel` covers a contiguous tensor that is quantized along the last dim but one."""
    rows, length = block_of(spec)
    return (
        v.sizes[3] % length == 0
        and rows == 1
        and length <= 32
        and spec.hadamard in (0, length)
        and spec.format != "s2f6"
        and (spec.rounding != STOCHASTIC or v.sizes[2] % 4 == 0)
    )


def along_rows(spec: QuantSpec, v: View) -> bool:
    """Return whether `rows_kernel` covers a contiguous tensor that is quantized along the last dim to codes alone."""
    return (
        block_of(spec)[1] in (16, 32)
        and v.sizes[3] % block_of(spec)[1] == 0
        and v.sizes[0] <= MAX_GRID
        and not spec.hadamard
        and spec.format != "s2f6"
    )


def grid_of(batches: int, num_l: int, num_c: int, rows: int, c: int) -> tuple[tuple[int, int], int]:
    """Return the grid (batches x tiles along C, tiles along L), and the rows of a tile, more where CUDA needs it."""
    while ceil_div(num_l, rows) > MAX_GRID:
        rows *= 2
    return (batches * ceil_div(num_c, c), ceil_div(num_l, rows)), rows


def warps_of(elements: int) -> int:
    """Return how many warps share a tile."""
    return 4 if elements <= 4096 else 8 if elements <= 16384 else 16


def prepare(x: Tensor, dim: int, stochastic: bool) -> tuple[Tensor, View]:
    """Return a tensor that the kernels can read, and its view.

    Stochastic rounding numbers elements by their place in memory, which then has to be row-major.
    """
    x = x.detach().resolve_neg()
    if x.dtype not in DTYPES:
        x = x.to(torch.float32)
    if x.ndim <= 3 and not stochastic:
        return x, view(tuple(x.shape), dim, x.stride())
    x = x.contiguous()
    return x, view(tuple(x.shape), dim)


def given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor, or for ``None`` another one in the place of an argument that the kernel does not read."""
    return other if tensor is None else tensor

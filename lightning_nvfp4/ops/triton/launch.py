"""Host side of the kernels: one function for each, which lays out the results and launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_nvfp4.formats.block import BLOCK_FORMATS
from lightning_nvfp4.formats.rounding import STOCHASTIC
from lightning_nvfp4.ops.layout import ceil_div, num_blocks, per_expert, stored_length
from lightning_nvfp4.ops.triton.device import column_kernel, matrix_kernel, row_kernel
from lightning_nvfp4.ops.triton.device import quantize_kernel as kernels
from lightning_nvfp4.ops.triton.geometry import (
    MAX_GRID,
    View,
    along_rows,
    column_tile,
    constants_of,
    down_columns,
    given,
    grid_of,
    power_of_two,
    prepare,
    row_tile,
    tile_of,
    view,
    warps_of,
    whole_blocks,
)
from lightning_nvfp4.ops.triton.runtime import in_pairs, launch, native_fp8
from lightning_nvfp4.recipe import QuantSpec

MAX_ROW = 16384
"""Longest row whose amax and codes one program finds, elements in registers."""
REQUANTIZE_TILE = (256, 4)
"""Columns of a tile of 32 rows, and warps."""
_COLUMN_CONSTANTS = tuple(name for name in constants_of(QuantSpec()) if name in column_kernel.columns_kernel.arg_names)
_ROW_CONSTANTS = tuple(name for name in constants_of(QuantSpec()) if name in row_kernel.rows_kernel.arg_names)
_MATRIX_CONSTANTS = ("M", "E", "MAX", "RECIPROCAL", "MAX_EXPONENT", "RULE", "ZERO", "SR", "SATURATE")


def amax(x: Tensor, spec: QuantSpec, dim: int) -> Tensor:
    """Return the amax of the tensor scale, as `ops.reference.quantize.tensor_amax` (after RHT)."""
    x, v = prepare(x, dim, False)
    na, nb, nl, nk = v.sizes
    if spec.tensor_scale == "row":
        out = torch.zeros(*x.shape[:dim], *x.shape[dim + 1 :], 1, dtype=torch.int32, device=x.device)
        strides = (nb * nl, nl)
    elif per_expert(x.ndim, dim):
        out = torch.zeros(na, 1, 1, dtype=torch.int32, device=x.device)
        strides = (1, 0)
    else:
        out = torch.zeros((), dtype=torch.int32, device=x.device)
        strides = (0, 0)
    constants = constants_of(spec)
    rows, c = tile_of(spec, v, False)
    block = constants["BLOCK"]
    steps = max(1, min(4, ceil_div(nk, c * block)))
    grid = (na * nb * ceil_div(nl, rows) * ceil_div(nk, steps * c * block),)
    launch(
        kernels.amax_kernel,
        grid,
        x,
        x, out, nb, nl, nk, *v.strides, *strides,
        SIGNS=constants["SIGNS"], HADAMARD=constants["HADAMARD"], L_TILE=rows, C=c, BLOCK=block, STEPS=steps,
        PER_ROW=spec.tensor_scale == "row",
        num_warps=4,
    )  # fmt: skip
    return out.view(torch.float32)


def quantize(
    x: Tensor,
    spec: QuantSpec,
    dim: int,
    seed: Tensor,
    amax_: Tensor | None,
    codes: bool,
    values: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Quantize in one read of x (two for a tensor scale over more than a row).

    Args:
        x: any floating-point dtype, not empty.
        spec: a format without an `uncovered` reason.
        dim: the quantized dim, non-negative.
        seed: 0-dim int64 on x's device.
        amax_: explicit amax, broadcastable to (L, C), or ``None``.
        codes: return codes and block scales, as the contract lays them out.
        values: return unscaled values of this dtype, in x's layout with `dim` of the stored length.

    Returns:
        codes, block scales, values, decode tensor scale, amax; ``None`` for what was not asked for or does not exist.
    """
    stochastic = spec.rounding == STOCHASTIC
    x, v = prepare(x, dim, stochastic)
    constants = constants_of(spec)
    shape = tuple(x.shape)
    na, nb, nl, nk = v.sizes
    length, num_c, block = stored_length(nk, spec), num_blocks(nk, spec), constants["BLOCK"]
    rows, c = tile_of(spec, v, codes)
    lead = [n for d, n in enumerate(shape) if d != dim]
    row_amax, per_block, strides = False, False, (0, 0, 0, 0)
    sixth = tensor_scale = None
    columns = dim == x.ndim - 2 and x.is_contiguous() and down_columns(spec, v)
    if constants["NV"]:
        # Not down a single column, whose elements are neighbours too: its kernel is given the amax.
        alone = v.strides[3] == 1 and length <= MAX_ROW and not columns
        row_amax = amax_ is None and spec.tensor_scale == "row" and alone
        if row_amax:
            c = max(power_of_two(num_c), (spec.hadamard or 1) // block, 1)
            rows = max(constants["ROWS"], min(power_of_two(nl), max(1, 8192 // (c * block))))
            amax_, tensor_scale = (torch.empty(*lead, 1, dtype=torch.float32, device=x.device) for _ in range(2))
            sixth = amax_
        else:
            amax_ = amax(x, spec, dim) if amax_ is None else amax_
            sixth, tensor_scale = tensor_scales(amax_)
        per_block = amax_.ndim > 0 and amax_.shape[-1] > 1
        strides = sixth.expand(*lead, num_c).reshape(na, nb, nl, num_c).stride()
    four_bits = constants["TOP"] == 3
    stored = ceil_div(length, 2) if four_bits else length
    code_dtype = torch.int8 if constants["M"] == -1 else torch.uint8
    out_codes = torch.empty(*lead, stored, dtype=code_dtype, device=x.device) if codes else None
    out_scale = torch.empty(*lead, num_c, dtype=torch.uint8, device=x.device) if codes else None
    words = stored % 4 == 0
    stored_codes = out_codes.view(torch.int32) if out_codes is not None and words else given(out_codes, x)
    out_values, vs = None, (0, 0, 0, 0)
    if values is not None:
        out_shape = (*shape[:dim], length, *shape[dim + 1 :])
        out_values = torch.empty(out_shape, dtype=values, device=x.device)
        vs = view(out_shape, dim).strides
    if columns:
        tile, c, warps, registers = column_tile(spec, codes)
        tiles = ceil_div(nl, tile), ceil_div(num_c, c)
        across = tiles[1] <= MAX_GRID  # neighbours in x run together
        launch(
            column_kernel.columns_kernel, (*(tiles if across else tiles[::-1]), na), x,
            x, given(sixth, x), given(tensor_scale, x), stored_codes, given(out_scale, x), given(out_values, x), seed,
            num_c, strides[0], *strides[2:],
            NUM_L=nl, L_FIRST=across, HAS_CODES=codes, HAS_VALUES=values is not None,
            EVEN=nl % tile == 0 and num_c % c == 0, ONE_TENSOR=strides[2:] == (0, 0),
            PAIRS=in_pairs(x) and nl % 2 == 0, NATIVE=native_fp8(x),
            **{name: constants[name] for name in _COLUMN_CONSTANTS}, C=c, L_TILE=tile, num_warps=warps,
            maxnreg=registers,
        )  # fmt: skip
        return out_codes, out_scale, out_values, tensor_scale, amax_
    if codes and values is None and not row_amax and dim == x.ndim - 1 and x.is_contiguous() and along_rows(spec, v):
        tile, c, warps = row_tile(spec, nl)
        launch(
            row_kernel.rows_kernel, (ceil_div(num_c, c), ceil_div(nl, tile), na), x,
            x, given(sixth, x), given(tensor_scale, x), stored_codes, out_scale, seed,
            nl, num_c, strides[0], *strides[2:],
            EVEN=nl % tile == 0 and num_c % c == 0, ONE_TENSOR=strides[2:] == (0, 0), PAIRS=in_pairs(x),
            NATIVE=native_fp8(x), L_TILE=tile, C=c, num_warps=warps,
            **{name: constants[name] for name in _ROW_CONSTANTS},
        )  # fmt: skip
        return out_codes, out_scale, out_values, tensor_scale, amax_
    draw_axis = -1
    if stochastic and length == nk:
        if v.strides[3] == 1 and nk % 4 == 0:
            draw_axis = 2
        elif v.strides[2] == 1 and nl % 4 == 0 and rows % 4 == 0:
            draw_axis = 0
    whole = values is None and whole_blocks(spec, v)
    grid, rows = grid_of(na * nb, nl, num_c, rows, c)
    arguments = (
        x, given(amax_, x), given(sixth, x), given(tensor_scale, x),
        stored_codes, given(out_scale, x), given(out_values, x), seed,
        nb, nl, nk, length, stored, num_c, x.numel(), *v.strides, *strides, *vs,
    )  # fmt: skip
    even = nl % rows == 0 and nk % (c * block) == 0
    flags = {
        "BATCHED": na * nb > 1,
        "EVEN": even,
        "WHOLE": even and whole,
        "ROW_AMAX": row_amax,
        "PER_BLOCK": per_block,
        "HAS_CODES": codes,
        "WORDS": words,
        "HAS_VALUES": values is not None,
        "DRAW_AXIS": draw_axis,
    }
    tile = {"L_TILE": rows, "C": c, "num_warps": warps_of(rows * c * block // (2 if whole else 1))}
    launch(kernels.quantize_kernel, grid, x, *arguments, **flags, **constants, **tile)
    return out_codes, out_scale, out_values, tensor_scale, amax_


def requantize(
    codes: Tensor,
    block_scale: Tensor,
    tensor_scale: Tensor,
    source_shape: tuple[int, ...],
    spec: QuantSpec,
    seed: Tensor,
    values: torch.dtype,
    source: torch.dtype,
) -> Tensor:
    """Dequantize NVFP4 codes along the last dim and quantize along the one before it, in one pass.

    Args:
        codes: of a contract `QuantizedTensor` of 2D or 3D shape, without RHT.
        block_scale: likewise.
        tensor_scale: likewise.
        source_shape: its shape, (N, K) or (E, N, K).
        spec: ``mxfp8`` with blocks of one row, no RHT.
        seed: 0-dim int64 for stochastic rounding by index in the dequantized tensor.
        values: dtype of the result.
        source: dtype that the dequantized tensor is rounded to in between.

    Returns:
        Unscaled values of `source_shape`.
    """
    codes, block_scale = codes.contiguous(), block_scale.contiguous()
    constants = constants_of(spec)
    *experts, n, k = source_shape
    out = torch.empty(*experts, n, k, dtype=values, device=codes.device)
    scale = tensor_scale.expand(*experts, n, 1).reshape(-1, n)
    tile, warps = REQUANTIZE_TILE
    launch(
        matrix_kernel.requantize_kernel, (ceil_div(k, tile), ceil_div(n, 32), math.prod(experts)), codes,
        codes, block_scale, scale, out, seed, n, *scale.stride(),
        NUM_K=k, BF16=source == torch.bfloat16, NATIVE=native_fp8(codes),
        **{name: constants[name] for name in _MATRIX_CONSTANTS},
        EVEN=n % 32 == 0 and k % tile == 0, K_TILE=tile, num_warps=warps,
    )  # fmt: skip
    return out


def decode(
    codes: Tensor,
    block_scale: Tensor,
    tensor_scale: Tensor | None,
    spec: QuantSpec,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    inverse: bool,
) -> Tensor:
    """Decode in one read: codes times block scales, times tensor scale where given, then the inverse RHT if asked.

    Args:
        codes: of the contract.
        block_scale: likewise.
        tensor_scale: likewise, or ``None``.
        spec: their format.
        shape: of the tensor that was quantized; without `inverse` the result has the stored length along `dim`.
        dim: the quantized dim in it.
        dtype: of the result.
        inverse: apply the inverse transform.
    """
    codes, block_scale = codes.contiguous(), block_scale.contiguous()
    constants = constants_of(spec)
    if not inverse:
        shape = (*shape[:dim], stored_length(shape[dim], spec), *shape[dim + 1 :])
    source = view((*shape[:dim], codes_length(codes, spec), *shape[dim + 1 :]), dim)
    na, nb, nl, nk = source.sizes
    num_c = block_scale.shape[-1]
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    strides = view(tuple(out.shape), dim).strides
    tensor_strides = (0, 0, 0, 0)
    if tensor_scale is not None:
        lead = [n for d, n in enumerate(shape) if d != dim]
        spread = tensor_scale.expand(*lead, num_c).reshape(na, nb, nl, num_c)
        tensor_scale, tensor_strides = spread, spread.stride()
    rows, c = tile_of(spec, View((na, nb, nl, nk), strides), True)
    grid = (na * nb * ceil_div(nl, rows) * ceil_div(num_c, c),)
    hadamard = constants["HADAMARD"] if inverse else 0
    launch(
        kernels.decode_kernel,
        grid,
        codes,
        codes, block_scale, given(tensor_scale, codes), out,
        nb, nl, shape[dim], codes.shape[-1], num_c, *tensor_strides, *strides,
        HAS_TENSOR=tensor_scale is not None, HADAMARD=hadamard,
        **{name: constants[name] for name in ("NV", "M", "E", "TOP", "SIGNS", "BLOCK")},
        L_TILE=rows, C=c, num_warps=warps_of(rows * c * constants["BLOCK"]),
    )  # fmt: skip
    return out


def transform(x: Tensor, spec: QuantSpec, dim: int) -> Tensor:
    """Return x under the spec's Hadamard transform, float32, `dim` padded to whole transforms."""
    x, v = prepare(x, dim, False)
    constants = constants_of(spec)
    shape = (*x.shape[:dim], stored_length(x.shape[dim], spec), *x.shape[dim + 1 :])
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    na, nb, nl, nk = v.sizes
    c = 1 if v.strides[3] != 1 else max(1, min(power_of_two(shape[dim]), 1024) // constants["HADAMARD"])
    rows = max(1, min(power_of_two(nl), 4096 // (c * constants["HADAMARD"])))
    grid = (na * nb * ceil_div(nl, rows) * ceil_div(shape[dim], c * constants["HADAMARD"]),)
    launch(
        kernels.transform_kernel, grid, x, x, out, nb, nl, nk, shape[dim], *v.strides, *view(shape, dim).strides,
        SIGNS=constants["SIGNS"], HADAMARD=constants["HADAMARD"], L_TILE=rows, C=c, num_warps=4,
    )  # fmt: skip
    return out


def both(x: Tensor, spec: QuantSpec, seed: Tensor, values: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to MXFP8 along its last and along its first dim, in one read and with one draw for both.

    Args:
        x: (R, K), not empty.
        spec: ``mxfp8`` with blocks of one row, no RHT.
        seed: 0-dim int64.
        values: dtype of the results.

    Returns:
        Unscaled values along the last, and along the first dim, both (R, K).
    """
    x, _ = prepare(x, 1, True)  # row-major
    num_r, num_k = x.shape
    constants = constants_of(spec)
    row, column = (torch.empty_like(x, dtype=values) for _ in range(2))
    launch(
        matrix_kernel.both_kernel, (ceil_div(num_r, 32) * ceil_div(num_k, 64),), x,
        x, row, column, seed, num_r, num_k,
        ALIGNED=num_k % 4 == 0, EVEN=num_r % 32 == 0 and num_k % 64 == 0, R_TILE=32, K_TILE=64, num_warps=2,
        **{name: constants[name] for name in _MATRIX_CONSTANTS},
    )  # fmt: skip
    return row, column


def tensor_scales(amax_: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sixth of the encode tensor scale, and the decode tensor scale, of an amax of any shape; float32."""
    source = amax_.contiguous()
    sixth, decoded = torch.empty_like(source), torch.empty_like(source)
    grid = (ceil_div(max(source.numel(), 1), 1024),)
    launch(kernels.tensor_scales_kernel, grid, source, source, sixth, decoded, source.numel(), BLOCK=1024, num_warps=4)
    return sixth, decoded


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """Return a seed as an int64 tensor on the device; integers wrap to 64 bits."""
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64)
    wrapped = seed & (2**64 - 1)
    # Filled on the device: a copy from the host would be waited for.
    return torch.full((), wrapped - 2**64 if wrapped >> 63 else wrapped, dtype=torch.int64, device=device)


def codes_length(codes: Tensor, spec: QuantSpec) -> int:
    """Return how many codes a row holds at most."""
    return codes.shape[-1] * BLOCK_FORMATS[spec.format].codes_per_byte

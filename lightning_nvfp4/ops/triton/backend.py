"""The Triton kernels as a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.formats.rounding import STOCHASTIC
from lightning_nvfp4.ops.interface import Parts, QuantizedMeta
from lightning_nvfp4.ops.triton import gemm, geometry, launch, traced
from lightning_nvfp4.ops.triton.runtime import INTERPRETED
from lightning_nvfp4.ops.triton.wire import decode_rows, encode_rows, move_rows, moves, sum_rows, wires
from lightning_nvfp4.recipe import QuantSpec

__all__ = [
    "decode",
    "decode_rows",
    "encode_rows",
    "move_rows",
    "moves",
    "quantize",
    "quantize_twice",
    "requantize",
    "rows",
    "sum_rows",
    "tokens",
    "transform",
    "uncovered",
    "wires",
]


def uncovered(x: Tensor, spec: QuantSpec) -> str | None:
    """Return why the kernels cannot work on x in a format, or ``None``."""
    if not x.is_cuda and not INTERPRETED:
        return f"it is on {x.device}, and the kernels run on CUDA (or anywhere with TRITON_INTERPRET=1)"
    return geometry.uncovered(spec)


def quantize(
    x: Tensor,
    spec: QuantSpec,
    dim: int,
    seed: int | Tensor,
    amax: Tensor | None,
    codes: bool,
    values: torch.dtype | None,
) -> Parts:
    """Implement `ops.interface.Backend.quantize`."""
    if torch.compiler.is_compiling():
        found = traced.quantize(x, traced.written(spec), dim, _seed(seed, spec, x), amax, codes, values)
        wanted = (codes, codes, values is not None, spec.format == "nvfp4", spec.format == "nvfp4" and amax is None)
        parts = Parts(*[part if want else None for part, want in zip(found, wanted, strict=True)])
        return parts if amax is None else parts._replace(amax=amax)
    return Parts(*launch.quantize(x, spec, dim, _seed(seed, spec, x), amax, codes, values))


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
    """Implement `ops.interface.Backend.decode`."""
    if torch.compiler.is_compiling():
        text = traced.written(spec)
        return traced.decode(codes, block_scale, tensor_scale, text, list(shape), dim, dtype, inverse)
    return launch.decode(codes, block_scale, tensor_scale, spec, shape, dim, dtype, inverse)


def transform(x: Tensor, spec: QuantSpec, dim: int) -> Tensor:
    """Implement `ops.interface.Backend.transform`."""
    if torch.compiler.is_compiling():
        return traced.transform(x, traced.written(spec), dim)
    return launch.transform(x, spec, dim)


def quantize_twice(
    x: Tensor, along_last: QuantSpec, along_first: QuantSpec, seed: int | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Implement `ops.interface.Backend.quantize_twice`."""
    if along_last == along_first and _plain_mxfp8(along_last):
        if torch.compiler.is_compiling():
            pair = traced.quantize_twice(x, traced.written(along_last), _seed(seed, along_last, x), dtype)
            return pair[0], pair[1]
        return launch.both(x, along_last, _seed(seed, along_last, x), dtype)
    last = quantize(x, along_last, 1, seed, None, False, dtype).values
    first = quantize(x, along_first, 0, seed, None, False, dtype).values
    assert last is not None and first is not None
    return last, first


def requantize(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    meta: QuantizedMeta,
    spec: QuantSpec,
    dim: int,
    seed: int | Tensor,
    dtype: torch.dtype,
    source: torch.dtype,
) -> Tensor | None:
    """Implement `ops.interface.Backend.requantize`: from NVFP4 along the last dim to MXFP8 along the one before."""
    codes, block_scale, tensor_scale, _ = tensors
    ndim = len(meta.shape)
    from_rows = meta.spec.format == "nvfp4" and not meta.spec.hadamard and meta.dim == ndim - 1
    if not from_rows or not _plain_mxfp8(spec) or dim != ndim - 2 or ndim > 3 or tensor_scale is None:
        return None
    if (tensor_scale.ndim and tensor_scale.shape[-1] != 1) or source not in (torch.float32, torch.bfloat16):
        return None
    seed = _seed(seed, spec, codes)
    if torch.compiler.is_compiling():
        text = traced.written(spec)
        return traced.requantize(codes, block_scale, tensor_scale, list(meta.shape), text, seed, dtype, source)
    return launch.requantize(codes, block_scale, tensor_scale, meta.shape, spec, seed, dtype, source)


def rows(
    a_RK: Tensor,
    b: Tensor,
    offsets: Tensor,
    transposed: bool,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Implement `ops.gemm.rows_matmul`."""
    function = traced.rows if torch.compiler.is_compiling() else gemm.rows
    return function(a_RK, b, offsets, transposed, row_scale, column_scale, bias_EN, dtype)


def tokens(
    a_RN: Tensor, b_RK: Tensor, offsets: Tensor, row_scale: Tensor | None, column_scale: Tensor | None
) -> Tensor:
    """Implement `ops.gemm.tokens_matmul`."""
    function = traced.tokens if torch.compiler.is_compiling() else gemm.tokens
    return function(a_RN, b_RK, offsets, row_scale, column_scale)


def _plain_mxfp8(spec: QuantSpec) -> bool:
    return spec.format == "mxfp8" and spec.block == (1, 32) and not spec.hadamard


def _seed(seed: int | Tensor, spec: QuantSpec, like: Tensor) -> Tensor:
    """Return the seed on the device; without stochastic rounding any tensor will do."""
    if spec.rounding != STOCHASTIC:
        return like
    return launch.seed_tensor(seed, like.device)

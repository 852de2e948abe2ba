"""The reference as a backend: compiled loops on the CPU where they apply, else the definition in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.ops.interface import Parts, QuantizedMeta
from lightning_nvfp4.ops.layout import expand_scale, pad_last, stored_length
from lightning_nvfp4.ops.reference import fast, hadamard
from lightning_nvfp4.ops.reference import quantize as definition
from lightning_nvfp4.recipe import QuantSpec


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
    # Four over six is plain torch only.
    kernels = None if spec.four_over_six else fast.kernels_for(x)
    if not codes:
        if kernels is None:
            decoded, tensor_scale, amax = definition.quantize_unpacked(x, spec, dim, seed, amax)
        else:
            decoded, _, tensor_scale, amax = fast.quantize(kernels, x, spec, dim, seed, amax, packed=False)
        return Parts(None, None, decoded.movedim(-1, dim).to(values or torch.float32), tensor_scale, amax)
    if kernels is None:
        packed, block_scale, tensor_scale, amax = definition.quantize_packed(x, spec, dim, seed, amax)
    else:
        packed, block_scale, tensor_scale, amax = fast.quantize(kernels, x, spec, dim, seed, amax, packed=True)
        assert block_scale is not None
    decoded = None
    if values is not None:
        decoded = decode(packed, block_scale, None, spec, tuple(x.shape), dim, values, False)
    return Parts(packed, block_scale, decoded, tensor_scale, amax)


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
    codes, block_scale = codes.contiguous(), block_scale.contiguous()
    kernels = fast.kernels_for(codes)
    length = stored_length(shape[dim], spec)
    values = (definition.decode if kernels is None else kernels.decode)(codes, block_scale, spec, length)
    if tensor_scale is not None:
        values = values * expand_scale(tensor_scale, block_scale.shape, spec, length)
    if inverse and spec.hadamard:
        values = hadamard.inverse(values, spec)[..., : shape[dim]]
    return values.movedim(-1, dim).to(dtype)


def transform(x: Tensor, spec: QuantSpec, dim: int) -> Tensor:
    """Implement `ops.interface.Backend.transform`."""
    moved = x.detach().movedim(dim, -1)
    kernels = fast.kernels_for(x)
    if kernels is None:
        transformed = hadamard.transform(pad_last(moved.to(torch.float32), spec.hadamard or 1), spec)
    else:
        transformed = fast.hadamard_transform(kernels, moved, spec)
    return transformed.movedim(-1, dim)


def quantize_twice(
    x: Tensor, along_last: QuantSpec, along_first: QuantSpec, seed: int | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Implement `ops.interface.Backend.quantize_twice`."""
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
    """Implement `ops.interface.Backend.requantize`: always two steps."""
    return None

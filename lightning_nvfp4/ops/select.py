"""The door to quantization: checks the arguments and picks the backend."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats.element import ELEMENTS, S2F6
from lightning_nvfp4.ops.backends import backend_for
from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.interface import Parts
from lightning_nvfp4.ops.layout import normalize_dim, num_blocks, stored_length
from lightning_nvfp4.ops.reference import quantize as reference
from lightning_nvfp4.recipe import QuantSpec


def quantize(
    x: Tensor,
    spec: QuantSpec,
    *,
    dim: int = -1,
    seed: int | Tensor = 0,
    backend: str = "auto",
    amax: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a tensor along one dim.

    Args:
        x: any floating-point dtype (computed from its FP32 rounding), at least one dim, any lengths (also 0). A 3D
            tensor quantized along one of its last two dims is a stack of expert weights: each expert has its own
            tensor scale, and 2D blocks stay inside it.
        spec: the format.
        dim: the dim blocks run along.
        seed: 64-bit seed of stochastic rounding, an integer or a 0-dim int64 tensor. The random bits of an element are
            a function of the seed and of its row-major index in `x`.
        backend: ``auto``, ``reference`` or ``triton``; a named one is never replaced by another.
        amax: amax for the tensor scale of ``nvfp4`` in place of the tensor's own, float32, broadcastable to
            `block_scale` (L, C): (rows, 1) or (1, C) or (rows, C) for segments of rows or of blocks. The tensor scale
            gets the same shape and `QuantizedTensor.dequantize` multiplies each block by its entry.

    Raises:
        UserError: an argument that the format or this machine does not allow.
    """
    dim, parts = _quantize(x, spec, dim, seed, backend, amax, True, None)
    return _packed(parts, x, spec, dim)


def quantize_values(
    x: Tensor,
    spec: QuantSpec,
    *,
    dim: int = -1,
    seed: int | Tensor = 0,
    backend: str = "auto",
    amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Return what ``quantize(...)`` decodes to as a GEMM operand, without packing, and its tensor scale.

    Arguments as `quantize`, and the dtype of the values. They are bit-equal to `QuantizedTensor.operand`.
    """
    _, parts = _quantize(x, spec, dim, seed, backend, amax, False, dtype)
    assert parts.values is not None
    return parts.values, parts.tensor_scale


def quantize_with_values(
    x: Tensor,
    spec: QuantSpec,
    *,
    dim: int = -1,
    seed: int | Tensor = 0,
    backend: str = "auto",
    amax: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[QuantizedTensor, Tensor]:
    """Return codes to save and values to multiply at once; arguments as `quantize_values`."""
    dim, parts = _quantize(x, spec, dim, seed, backend, amax, True, dtype)
    assert parts.values is not None
    return _packed(parts, x, spec, dim), parts.values


def quantize_values_twice(
    x: Tensor,
    along_last: QuantSpec,
    along_first: QuantSpec,
    *,
    seed: int | Tensor = 0,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the values of a matrix quantized along its last and along its first dim, both under one seed.

    Only for formats without tensor scale. Equal to two calls of `quantize_values`, in one pass where a backend can.

    Raises:
        UserError: no matrix, or a format with a tensor scale.
    """
    _check(x, along_last, -1, None)
    _check(x, along_first, 0, None)
    scales = {along_last.tensor_scale, along_first.tensor_scale}
    if x.ndim != 2 or scales != {"none"}:
        raise UserError(
            f"quantize_values_twice got x of shape {tuple(x.shape)} and formats {along_last.format!r} and "
            f"{along_first.format!r}: it takes a matrix and formats without tensor scale. Use quantize_values twice."
        )
    if x.numel() == 0:
        first, second = _empty(x, along_last, 1, None), _empty(x, along_first, 0, None)
        return first.operand(dtype), second.operand(dtype)
    return backend_for(x, along_last, backend).quantize_twice(x, along_last, along_first, _checked_seed(seed), dtype)


def requantize_values(
    q: QuantizedTensor,
    spec: QuantSpec,
    *,
    dim: int,
    seed: int | Tensor = 0,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
    source: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Equal ``quantize_values(q.dequantize(source), spec, ...)``, in one pass where a backend can."""
    dim = normalize_dim(dim, len(q.shape))
    if q.codes.numel():
        values = backend_for(q.codes, spec, backend).requantize(
            q.tensors(), q.meta, spec, dim, _checked_seed(seed), dtype, source
        )
        if values is not None:
            return values, None
    return quantize_values(q.dequantize(source), spec, dim=dim, seed=seed, backend=backend, dtype=dtype)


def hadamard_transform(x: Tensor, spec: QuantSpec, *, dim: int = -1) -> Tensor:
    """Return the random Hadamard transform that `quantize` applies, float32 in x's layout.

    `dim` is padded with zeros to whole transforms, and every value is rounded to BF16 once: quantizing the result under
    the same spec without the transform gives the bits of quantizing x under the spec (to nearest).

    Args:
        x: any floating-point dtype, at least one dim.
        spec: names the transform; without one x is returned in float32.
        dim: the dim to transform along.
    """
    dim = normalize_dim(dim, x.ndim)
    if not spec.hadamard:
        return x.detach().to(torch.float32)
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:dim], stored_length(x.shape[dim], spec), *x.shape[dim + 1 :], dtype=torch.float32)
    return backend_for(x, spec).transform(x, spec, dim)


def _quantize(
    x: Tensor,
    spec: QuantSpec,
    dim: int,
    seed: int | Tensor,
    backend: str,
    amax: Tensor | None,
    codes: bool,
    dtype: torch.dtype | None,
) -> tuple[int, Parts]:
    dim, amax = _check(x, spec, dim, amax)
    seed = _checked_seed(seed)
    implementation = backend_for(x, spec, backend)
    if x.numel() == 0:
        q = _empty(x, spec, dim, amax)
        values = None if dtype is None else q.operand(dtype)
        return dim, Parts(q.codes, q.block_scale, values, q.tensor_scale, q.amax)
    return dim, implementation.quantize(x, spec, dim, seed, amax, codes, dtype)


def _packed(parts: Parts, x: Tensor, spec: QuantSpec, dim: int) -> QuantizedTensor:
    assert parts.codes is not None and parts.block_scale is not None
    return QuantizedTensor(parts.codes, parts.block_scale, parts.tensor_scale, parts.amax, spec, tuple(x.shape), dim)


def _check(x: Tensor, spec: QuantSpec, dim: int, amax: Tensor | None) -> tuple[int, Tensor | None]:
    """Refuse what cannot be quantized; return `dim` as a non-negative index and `amax` as float32 on x's device."""
    if not isinstance(x, Tensor) or not isinstance(spec, QuantSpec):
        raise UserError(
            f"quantize got x of type {type(x).__name__} and spec of type {type(spec).__name__}: give a tensor and "
            "a QuantSpec, such as QuantSpec('nvfp4')."
        )
    if not torch.compiler.is_compiling() and (x.layout is not torch.strided or x.is_nested):
        raise UserError(
            f"x is {'nested' if x.is_nested else x.layout}: quantize takes dense tensors. Convert it first."
        )
    if x.ndim == 0 or not x.is_floating_point():
        raise UserError(
            f"x has shape {tuple(x.shape)} and dtype {x.dtype}: quantize takes floating-point tensors with at "
            "least one dim. Reshape or convert it first."
        )
    if amax is not None and not isinstance(amax, Tensor):
        raise UserError(f"amax = {amax!r} is no tensor: give one in float32, such as torch.tensor({amax!r}).")
    if amax is not None and spec.format != "nvfp4":
        raise UserError(
            f"amax was given for format {spec.format!r}, which has no tensor scale: leave it out, or use 'nvfp4'."
        )
    dim = normalize_dim(dim, x.ndim)
    if amax is not None:
        blocks = (*x.movedim(dim, -1).shape[:-1], num_blocks(x.shape[dim], spec))
        fits = zip(reversed(amax.shape), reversed(blocks), strict=False)
        if amax.ndim > len(blocks) or any(n not in (1, m) for n, m in fits):
            raise UserError(
                f"amax has shape {tuple(amax.shape)}, which does not broadcast to the block scales {blocks}: give one "
                "entry for the tensor, for each row, or for each block of a row."
            )
        amax = amax.detach().to(device=x.device, dtype=torch.float32)
    return dim, amax


def _checked_seed(seed: int | Tensor) -> int | Tensor:
    """Refuse what is no integer; integers of other libraries become Python's."""
    if isinstance(seed, int):
        return seed
    if isinstance(seed, Tensor):
        if seed.numel() == 1 and not seed.is_floating_point() and not seed.is_complex():
            return seed
        raise UserError(
            f"seed is a tensor of shape {tuple(seed.shape)} and dtype {seed.dtype}: give one int64 element."
        )
    try:
        return operator.index(seed)
    except TypeError:
        raise UserError(f"seed = {seed!r} must be an integer, or a tensor with one.") from None


def _empty(x: Tensor, spec: QuantSpec, dim: int, amax: Tensor | None) -> QuantizedTensor:
    """Return the quantized form of a tensor without elements."""
    lead = [n for d, n in enumerate(x.shape) if d != dim]
    length = stored_length(x.shape[dim], spec)
    element = ELEMENTS[spec.element or ""]
    stored = -(-length // 2) if element.bits == 4 else length
    codes = torch.zeros(*lead, stored, dtype=torch.int8 if element is S2F6 else torch.uint8, device=x.device)
    block_scale = torch.zeros(*lead, num_blocks(x.shape[dim], spec), dtype=torch.uint8, device=x.device)
    scale = None
    if spec.format == "nvfp4":
        amax = reference.tensor_amax(x.detach().movedim(dim, -1), spec, dim) if amax is None else amax
        scale = reference.decode_tensor_scale(reference.encode_tensor_scale(amax, spec))
    return QuantizedTensor(codes, block_scale, scale, amax, spec, tuple(x.shape), dim)

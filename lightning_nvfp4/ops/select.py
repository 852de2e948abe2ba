"""The door to quantization: checks the arguments and picks the backend."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from lightning_nvfp4 import capability
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats.element import ELEMENTS, S2F6
from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.reference import fast
from lightning_nvfp4.ops.reference import quantize as reference
from lightning_nvfp4.ops.reference.hadamard import transform
from lightning_nvfp4.ops.reference.layout import normalize_dim, num_blocks, pad_last, stored_length
from lightning_nvfp4.ops.reference.native import Kernels
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
        backend: ``auto``, ``reference``, ``triton`` or ``te``; never replaced by another silently.
        amax: amax for the tensor scale of ``nvfp4`` in place of the tensor's own, float32, broadcastable to
            `block_scale` (L, C): (rows, 1) or (1, C) or (rows, C) for segments of rows or of blocks. The tensor scale
            gets the same shape and `QuantizedTensor.dequantize` multiplies each block by its entry.

    Raises:
        UserError: an argument that the format or this machine does not allow.
    """
    dim, amax = _check(x, spec, dim, backend, amax)
    seed = _checked_seed(seed)
    if x.numel() == 0:
        return _empty(x, spec, dim, amax)
    kernels = _kernels(x, spec)
    if kernels is None:
        codes, block_scale, tensor_scale, amax = reference.quantize_packed(x, spec, dim, seed, amax)
    else:
        codes, block_scale, tensor_scale, amax = fast.quantize(kernels, x, spec, dim, seed, amax, packed=True)
        assert block_scale is not None
    return QuantizedTensor(codes, block_scale, tensor_scale, amax, spec, tuple(x.shape), dim)


def quantize_values(
    x: Tensor,
    spec: QuantSpec,
    *,
    dim: int = -1,
    seed: int | Tensor = 0,
    backend: str = "auto",
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``quantize(...)``'s `unscaled_values` (float32) and tensor scale, without packing: for a GEMM at once.

    Arguments as `quantize`; the values are bit-equal to its.
    """
    dim, amax = _check(x, spec, dim, backend, amax)
    seed = _checked_seed(seed)
    if x.numel() == 0:
        empty = _empty(x, spec, dim, amax)
        return empty.unscaled_values(), empty.tensor_scale
    kernels = _kernels(x, spec)
    if kernels is None:
        return reference.quantize_unpacked(x, spec, dim, seed, amax)
    values, _, tensor_scale, _ = fast.quantize(kernels, x, spec, dim, seed, amax, packed=False)
    return values, tensor_scale


def hadamard_transform(x: Tensor, spec: QuantSpec, *, dim: int = -1) -> Tensor:
    """Return the random Hadamard transform that `quantize` applies, float32 in its moved layout (L, `length`).

    Rows are padded with zeros to whole transforms, and every value is rounded to BF16 once: quantizing the result under
    the same spec without the transform gives the bits of quantizing x under the spec (to nearest).

    Args:
        x: any floating-point dtype, at least one dim.
        spec: names the transform; without one x is returned, moved.
        dim: the dim to transform along.
    """
    moved = x.detach().movedim(normalize_dim(dim, x.ndim), -1)
    if not spec.hadamard or x.numel() == 0:
        return pad_last(moved.to(torch.float32), spec.hadamard or 1)
    kernels = fast.kernels_for(x)
    if kernels is None:
        return transform(pad_last(moved.to(torch.float32), spec.hadamard), spec)
    return fast.hadamard_transform(kernels, moved, spec)


def _kernels(x: Tensor, spec: QuantSpec) -> Kernels | None:
    """Return the compiled kernels where they apply; four over six is plain torch only."""
    return None if spec.four_over_six else fast.kernels_for(x)


def _check(x: Tensor, spec: QuantSpec, dim: int, backend: str, amax: Tensor | None) -> tuple[int, Tensor | None]:
    """Refuse what cannot be quantized; return `dim` as a non-negative index and `amax` as float32 on x's device."""
    capability.require(backend)
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

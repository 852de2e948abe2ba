"""Block scales: from the largest magnitude of a block to its scale code, scale and the factor of its elements.

Magnitudes travel as int32 bits of nonnegative float32 (their order is the numbers' order, and NaN stands above
infinity), so that one integer maximum finds both the amax and whether a block is finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nvfp4.formats.block import BLOCK_FORMATS, FOUR_OVER_SIX_RANGE, NVFP4_RANGE
from lightning_nvfp4.formats.element import E2M1, E4M3, E8M0, ELEMENTS, ElementFormat
from lightning_nvfp4.formats.rounding import (
    FP32_BIAS,
    FP32_EXPONENT,
    FP32_FRACTION,
    FP32_MAGNITUDE,
    FP32_MANTISSA_BITS,
    FP32_MAX,
)
from lightning_nvfp4.ops.reference.elements import encode_float, power_of_two, round_float
from lightning_nvfp4.recipe import QuantSpec


@dataclass(frozen=True)
class BlockScales:
    """Scales of blocks, all of shape (L, C).

    Attributes:
        code: int32 code of the scale; the NaN code for a block that is not finite.
        value: float32 decode scale without the tensor scale; NaN for a block that is not finite.
        factor: float32 that elements are multiplied by before they are rounded.
    """

    code: Tensor
    value: Tensor
    factor: Tensor


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the int32 bits of |x| for float32 x."""
    return x.view(torch.int32) & FP32_MAGNITUDE


def finite_amax(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Return the largest magnitude among the finite elements as float32; 0 where there is none.

    Args:
        x: any floating-point dtype and shape.
        dim: dims to reduce, ``None`` for all.
        keepdim: keep reduced dims with length 1.
    """
    bits = magnitude_bits(x.detach().to(torch.float32))
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    reduced = {d % x.ndim for d in dims} if x.ndim else set()
    if any(x.shape[d] == 0 for d in reduced):
        kept = [1 if d in reduced else n for d, n in enumerate(x.shape) if keepdim or d not in reduced]
        return torch.zeros(kept, dtype=torch.float32, device=x.device)
    finite = bits.masked_fill(bits >= FP32_EXPONENT, 0)
    return (finite.amax(dims, keepdim=keepdim) if dims else finite).view(torch.float32)


def encode_tensor_scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Return the encode tensor scale min(range / amax, largest FP32); 1 where amax is 0 (or infinite)."""
    span = FOUR_OVER_SIX_RANGE if spec.four_over_six else NVFP4_RANGE
    encode = torch.div(torch.full_like(amax, span), amax).clamp(max=FP32_MAX)
    return encode.masked_fill((amax == 0) | (encode == 0), 1.0)


def decode_tensor_scale(encode: Tensor) -> Tensor:
    """Return RN(1 / encode); it may be subnormal, and is kept."""
    return torch.div(torch.ones_like(encode), encode)


def element_factor(scale: Tensor, decode_tensor: Tensor) -> Tensor:
    """Return min(RN(1 / RN(scale * decode_tensor)), largest FP32), which also serves blocks with scale 0."""
    product = scale * decode_tensor
    return torch.div(torch.ones_like(product), product).clamp(max=FP32_MAX)


def nvfp4_scales(top: Tensor, encode: Tensor) -> BlockScales:
    """Return E4M3 scales, rounded to nearest: amax * RN(encode / 6), in this order of roundings.

    Args:
        top: int32 magnitude bits of the block amax (L, C).
        encode: encode tensor scale, broadcastable to (L, C).
    """
    bad = top >= FP32_EXPONENT
    amax = top.masked_fill(bad, 0).view(torch.float32)
    # 1/6 as a multiplier rounds up: ties of the scale go the way Transformer Engine's do.
    sixth = torch.full_like(encode, 1.0 / E2M1.max)
    value = round_float((amax * (encode * sixth)).clamp(max=FP32_MAX), E4M3)
    factor = element_factor(value, decode_tensor_scale(encode))
    return finish(encode_float(value, E4M3), value, factor, bad, E4M3)


def finish(code: Tensor, value: Tensor, factor: Tensor, bad: Tensor, scale: ElementFormat) -> BlockScales:
    """Put the NaN scale on blocks that are not finite."""
    assert scale.nan_code is not None
    return BlockScales(code.masked_fill(bad, scale.nan_code), value.masked_fill(bad, float("nan")), factor)


def exponent_ceil(top: Tensor, largest: float) -> Tensor:
    """Return the E8M0 code of the smallest power of two 2^e with amax <= 2^e * largest, by integer comparison."""
    largest_bits = int(torch.tensor(largest).view(torch.int32))
    fraction = largest_bits & FP32_FRACTION
    exponent = (largest_bits >> FP32_MANTISSA_BITS) - FP32_BIAS
    code = (top >> FP32_MANTISSA_BITS) - exponent + ((top & FP32_FRACTION) > fraction).to(torch.int32)
    if exponent == 0:  # a subnormal amax, which has no leading one, is on either side of 2^-127 * largest
        subnormal = (top > ((1 << FP32_MANTISSA_BITS) + fraction) >> 1).to(torch.int32)
        code = torch.where(top >> FP32_MANTISSA_BITS == 0, subnormal, code)
    return code.clamp(0, E8M0.max_code)


def exponent_ceil_rounded(top: Tensor, largest: float) -> Tensor:
    """Return the E8M0 code of RN(amax * RN(1 / largest)) rounded up, as cvt.rp.satfinite.ue8m0 does."""
    ratio = (top.view(torch.float32) * (1.0 / largest)).view(torch.int32)
    exponent, fraction = ratio >> FP32_MANTISSA_BITS, ratio & FP32_FRACTION
    # Code 0 stands for 2^-127, which is half of the subnormal range.
    threshold = torch.where(exponent == 0, 1 << (FP32_MANTISSA_BITS - 1), 0)
    return (exponent + (fraction > threshold).to(torch.int32)).clamp(max=E8M0.max_code)


def exponent_floor(top: Tensor, max_exponent: int) -> Tensor:
    """Return the E8M0 code of 2^(floor(log2 amax) - max_exponent), the OCP rule."""
    return ((top >> FP32_MANTISSA_BITS) - max_exponent).clamp(0, E8M0.max_code)


def exponent_scales(top: Tensor, spec: QuantSpec) -> BlockScales:
    """Return E8M0 scales of ``mxfp8``, ``s2f6`` and ``fp8_block``.

    The ceil rule follows Transformer Engine: by a rounded product for MXFP8, exactly for the other two.
    """
    element = ELEMENTS[spec.element or ""]
    bad = top >= FP32_EXPONENT
    top = top.masked_fill(bad, 0)
    if spec.scale_rule == "floor":
        code = exponent_floor(top, element.max_exponent)
    elif spec.format == "mxfp8":
        code = exponent_ceil_rounded(top, element.max)
    else:
        code = exponent_ceil(top, element.max)
    zero_code = BLOCK_FORMATS[spec.format].zero_block_scale
    if zero_code:
        code = torch.where(top == 0, zero_code, code).to(torch.int32)
    return finish(code, power_of_two(code), power_of_two(2 * FP32_BIAS - code), bad, E8M0)

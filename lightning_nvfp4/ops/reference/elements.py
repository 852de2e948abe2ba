"""Rounding to and coding of one element type, in binary32 integer and exact floating-point steps.

Nothing here goes through a framework cast to FP8 or FP4: those differ in saturation, NaN and the sign of zero
from one library and release to the next. Each function gives the same bits on any device. Signs are moved as
integers, because a compiler that ignores signed zeros may not touch them there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.formats.element import ElementFormat
from lightning_nvfp4.formats.rounding import (
    FP32_BIAS,
    FP32_EXPONENT,
    FP32_MAGNITUDE,
    FP32_MANTISSA_BITS,
    FP32_SIGN,
)

_HALF_WORD = float(1 << 16)
_WORD = 16


def rounds_away(fraction: Tensor, random: Tensor, bits: int) -> Tensor:
    """Decide stochastic roundings: true where the magnitude goes up.

    Args:
        fraction: float32 in [0, 1), the exact distance above the lower neighbour in steps.
        random: int32, 32 random bits an element.
        bits: 32 compares floor(fraction * 2^32) with all bits, so that P(away) = fraction exactly for a fraction
            that is a multiple of 2^-32 (every value in the normal range of an element type) and less than 2^-32
            below it otherwise; 8 compares floor(fraction * 2^8) with the 8 highest bits.
    """
    if bits == 8:
        return ((random >> 24) & 0xFF).float() < (fraction * float(1 << 8)).floor()
    # Two exact halves of 16 bits: 32 bits do not fit a float32, and int64 is slow in vector registers.
    scaled = fraction * _HALF_WORD
    upper = scaled.floor()
    lower = ((scaled - upper) * _HALF_WORD).floor()
    random_upper = ((random >> _WORD) & 0xFFFF).float()
    random_lower = (random & 0xFFFF).float()
    return (random_upper < upper) | ((random_upper == upper) & (random_lower < lower))


def round_float(x: Tensor, element: ElementFormat, random: Tensor | None = None, random_bits: int = 32) -> Tensor:
    """Round to the values of a floating-point element type, saturating at its largest.

    Args:
        x: float32, any shape, no NaN (NaN gives an undefined finite value); infinities saturate.
        element: E2M1, E4M3 or E5M2.
        random: int32 of x's shape for stochastic rounding; ``None`` rounds to nearest, ties to even.
        random_bits: 32 or 8, see `rounds_away`.

    Returns:
        float32 values of the element type; the sign of x is kept, also on zero.
    """
    bits = x.view(torch.int32)
    magnitude = (bits & FP32_MAGNITUDE).view(torch.float32).clamp(max=element.max)
    lowest = (element.min_exponent + FP32_BIAS) << FP32_MANTISSA_BITS
    exponent = (magnitude.view(torch.int32) & FP32_EXPONENT).clamp(min=lowest)
    if random is None:
        # Adding 2^(23-m) times the leading power of two leaves m fraction bits: the FP32 adder rounds.
        shift = ((FP32_MANTISSA_BITS - element.mantissa_bits) << FP32_MANTISSA_BITS) + exponent
        anchor = shift.view(torch.float32)
        rounded = (magnitude + anchor) - anchor
    else:
        mantissa_bits = element.mantissa_bits << FP32_MANTISSA_BITS
        per_step = (((2 * FP32_BIAS) << FP32_MANTISSA_BITS) + mantissa_bits - exponent).view(torch.float32)
        step = (exponent - mantissa_bits).view(torch.float32)
        steps = magnitude * per_step
        below = steps.floor()
        rounded = (below + rounds_away(steps - below, random, random_bits).float()) * step
    return (rounded.view(torch.int32) | (bits & FP32_SIGN)).view(torch.float32)


def encode_float(values: Tensor, element: ElementFormat) -> Tensor:
    """Return the codes (int32) of float32 values that are already values of a floating-point element type."""
    bits = values.view(torch.int32)
    magnitude = bits & FP32_MAGNITUDE
    normal = (magnitude >> (FP32_MANTISSA_BITS - element.mantissa_bits)) - code_offset(element)
    subnormal = (values.abs() * 2.0 ** (element.mantissa_bits - element.min_exponent)).to(torch.int32)
    top = element.bits - 1
    code = torch.where(normal >= 1 << element.mantissa_bits, normal, subnormal)
    return code | ((bits >> (31 - top)) & (1 << top))


def decode_float(codes: Tensor, element: ElementFormat) -> Tensor:
    """Return the float32 values of integer codes of a floating-point element type; NaN codes give NaN."""
    codes = codes.to(torch.int32)
    top = element.bits - 1
    magnitude = codes & ((1 << top) - 1)
    normal = ((magnitude + code_offset(element)) << (FP32_MANTISSA_BITS - element.mantissa_bits)).view(torch.float32)
    subnormal = magnitude.to(torch.float32) * 2.0 ** (element.min_exponent - element.mantissa_bits)
    values = torch.where(magnitude >= 1 << element.mantissa_bits, normal, subnormal)
    values = (values.view(torch.int32) | ((codes >> top) << 31)).view(torch.float32)
    return values if element.nan_code is None else values.masked_fill(magnitude > element.max_code, float("nan"))


def code_offset(element: ElementFormat) -> int:
    """Return what separates the exponent and leading fraction bits of FP32 from a normal code."""
    return (FP32_BIAS - element.bias) << element.mantissa_bits


def round_fixed(steps: Tensor, limit: int, random: Tensor | None = None, random_bits: int = 32) -> Tensor:
    """Round float32 numbers of steps to integers (as float32) and clamp them to -limit..limit.

    Args:
        steps: float32, value over the weight of the last bit.
        limit: largest magnitude of a code, 127 for S2F6.
        random: int32 of the same shape for stochastic rounding; ``None`` rounds to nearest, ties to even.
        random_bits: 32 or 8, see `rounds_away`.

    Returns:
        float32 integers; zero is +0.
    """
    steps = steps.clamp(-float(limit), float(limit))
    if random is None:
        anchor = 1.5 * 2.0**FP32_MANTISSA_BITS
        return (steps + anchor) - anchor
    magnitude = steps.abs()
    below = magnitude.floor()
    rounded = below + rounds_away(magnitude - below, random, random_bits).float()
    return torch.where(steps < 0, 0.0 - rounded, rounded)


def power_of_two(exponent_code: Tensor) -> Tensor:
    """Return 2^(code - 127) as float32 for int32 E8M0 codes; code 0 is the subnormal 2^-127 and 255 is NaN."""
    bits = torch.where(exponent_code == 0, 1 << (FP32_MANTISSA_BITS - 1), exponent_code << FP32_MANTISSA_BITS)
    nan = FP32_EXPONENT | 1 << (FP32_MANTISSA_BITS - 1)
    return torch.where(exponent_code == 2 * FP32_BIAS + 1, nan, bits).to(torch.int32).view(torch.float32)

"""Device functions on single elements: rounding, coding and decoding, by integer and exact floating-point steps.

The steps are those of `ops.reference.elements` and `ops.reference.scales`, so that the bits are the same on every
device; but for the FP8 conversions, nothing goes through a hardware cast. Kernels that use them are launched without
contraction of multiplications and additions (``enable_fp_fusion=False``).

An element type is given by constexprs: M mantissa bits, E the exponent of the smallest normal value, MAX the bits of
the largest value as float32, TOP the position of its sign bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.formats.block import NVFP4_RANGE
from lightning_nvfp4.formats.element import E2M1, S2F6
from lightning_nvfp4.formats.rounding import (
    FP32_EXPONENT,
    FP32_MAGNITUDE,
    FP32_MANTISSA_BITS,
    FP32_MAX,
    FP32_SIGN,
)
from lightning_nvfp4.ops.triton import runtime

INTERPRETED = tl.constexpr(runtime.INTERPRETED)
EXPONENT = tl.constexpr(FP32_EXPONENT)
MAGNITUDE = tl.constexpr(FP32_MAGNITUDE)
SIGN = tl.constexpr(FP32_SIGN)
E2M1_PLACE = tl.constexpr(FP32_SIGN | 7 << FP32_MANTISSA_BITS - E2M1.mantissa_bits)
"""Sign, lowest exponent bits and highest fraction bit of a float32."""
LARGEST = tl.constexpr(FP32_MAX)
RANGE = tl.constexpr(NVFP4_RANGE)
SIXTH = tl.constexpr(1.0 / E2M1.max)
S2F6_STEPS = tl.constexpr(2.0**S2F6.mantissa_bits)
S2F6_STEP = tl.constexpr(2.0**-S2F6.mantissa_bits)


@triton.jit
def as_float(bits):
    """Read int32 bits as float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_bits(x):
    """Read float32 as int32 bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def larger(a, b):
    """Return the larger magnitude of two float32, NaN if one is NaN; one instruction."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounds_up(rest, random, SR: tl.constexpr):
    """Return whether a fraction of a step is rounded up: floor(fraction * 2^32) > random.

    Args:
        rest: the fraction times 2^32, exact float32. Its conversion to integers is off the pipe of integer arithmetic,
            which limits these kernels.
        random: uint32.
        SR: number of bits that count, 32 or, the highest of both, 8.
    """
    word = rest.to(tl.uint32)
    if SR == 8:
        word = word & 0xFF000000
    return word > random


@triton.jit
def round_float(
    x, random, M: tl.constexpr, E: tl.constexpr, MAX: tl.constexpr, SR: tl.constexpr, SATURATE: tl.constexpr
):
    """Round float32 to an element type of floating-point kind.

    SR is 0 for nearest, ties to even, or the number of random bits of `random` (uint32) that decide. SATURATE may be
    false where no finite x rounds above the largest value.

    Returns:
        Magnitudes of the results, float32, and int32 whose lowest bits are their codes without sign; the bits between
        those and the 23rd are zeros.
    """
    magnitude = _saturated(x, MAX, SATURATE)
    if SR == 0:
        # A maximum of floats takes the absolute value along.
        exponent = as_bits(tl.maximum(magnitude, 2.0**E)) >> 23
        # A float32 whose last bit has the weight of a step, and whose lowest bits count the steps below this exponent.
        anchor = as_float(exponent * ((1 << 23) + (1 << M)) + (((23 - M) << 23) - ((E + 127) << M)))
        total = magnitude + anchor  # the FP32 adder rounds to nearest
        return total - anchor, as_bits(total)
    else:
        exponent = tl.maximum(as_bits(magnitude) >> 23, E + 127)
        steps = _steps(magnitude, as_float((286 + M - exponent) << 23), SR)
        # The bits of 2^24 less the rounded number of steps are 2^24 less that number.
        less = _difference(tl.full(x.shape, 0x4B800000, tl.int32), random, steps)
        rounded = (16777216.0 - as_float(less)) * as_float((exponent - M) << 23)
        return rounded, (exponent - (E + 127)) * (1 << M) + (0x4B800000 - less)


@triton.jit
def stochastic_code(
    x, random, M: tl.constexpr, E: tl.constexpr, MAX: tl.constexpr, SR: tl.constexpr, SATURATE: tl.constexpr
):
    """Return the int32 codes, without sign and negated, of float32 rounded by random bits; see `round_float`."""
    magnitude = _saturated(x, MAX, SATURATE)
    # Steps of a normal number have their leading one, which the codes below its exponent count too.
    if M == 1 and E == 0:
        # The binade, 0 for all below 2, by the adder, off the pipe of integer arithmetic: rounding to even puts 2 and 4
        # in either of two, and 6 into the last.
        binade = as_bits((magnitude - 1.0) + 25165824.0)
        steps = _steps(magnitude, as_float(binade * -(1 << 23) + (160 << 23)), SR)
        return _difference(binade * -2 + (0x4BC00000 * 2 - (1 << 32)), random, steps)
    else:
        exponent = tl.maximum(as_bits(magnitude) >> 23, E + 127)
        steps = _steps(magnitude, as_float((286 + M - exponent) << 23), SR)
        return _difference(((E + 127) - exponent) * (1 << M), random, steps)


@triton.jit
def _saturated(x, MAX: tl.constexpr, SATURATE: tl.constexpr):
    magnitude = tl.abs(x)
    if SATURATE:
        magnitude = tl.minimum(magnitude, as_float(tl.full((), MAX, tl.int32)))
    return magnitude


@triton.jit
def _steps(magnitude, factor, SR: tl.constexpr):
    """Return numbers of steps as uint64, whose lower half is the fraction of one: 32 bits of it, or the highest 8."""
    steps = (magnitude * factor).to(tl.uint64)
    if SR == 8:
        steps = (steps >> 24) << 24
    return steps


@triton.jit
def _difference(whole, random, steps):
    """Return int32 `whole` less numbers of `_steps`, rounded up where the fraction is above uint32 `random`."""
    minuend = (whole.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | random.to(tl.uint64)
    return ((minuend - steps) >> 32).to(tl.int32)


@triton.jit
def absolute_pairs(words):
    """Clear the signs of BF16 pairs in int32."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", (words,), tl.int32, True, 1)
    return words & 0x7FFF7FFF


@triton.jit
def larger_pairs(a, b):
    """Return the larger of nonnegative BF16 pairs in int32, NaN if one is NaN."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", (a, b), tl.int32, True, 1)
    return tl.maximum(a & -0x10000, b & -0x10000) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def low_half(words):
    """Return the lower of BF16 pairs in int32 as float32."""
    return as_float(words << 16)


@triton.jit
def high_half(words):
    """Return the higher of BF16 pairs in int32 as float32."""
    return as_float(words & -0x10000)


@triton.jit
def paired(low, high):
    """Round two float32 to BF16, ties to even, as one int32."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", (low, high), tl.int32, True, 1)
    return (as_bits(to_bf16(high)) & -0x10000) | ((as_bits(to_bf16(low)) >> 16) & 0xFFFF)


@triton.jit
def to_bf16(x):
    """Round float32 to BF16 values, ties to even; the interpreter's own conversion truncates."""
    if not INTERPRETED:
        return x.to(tl.bfloat16).to(tl.float32)
    bits = as_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return as_float(tl.where((bits & MAGNITUDE) > EXPONENT, bits | 0x400000, rounded))


@triton.jit
def fp8_word(a, b, c, d, M: tl.constexpr):
    """Return int32 words of the E4M3 (M = 3) or E5M2 (2) codes of four float32, `a` lowest: nearest, ties to even.

    The device's own conversion, which saturates and keeps signs: the bits of `round_float`, on compute capability 8.9
    and higher.
    """
    if M == 3:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", (a, b, c, d), tl.int32, True, 1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", (a, b, c, d), tl.int32, True, 1,
    )  # fmt: skip


@triton.jit
def through_fp8(a, b, M: tl.constexpr):
    """Return two float32 rounded to E4M3 (M = 3) or E5M2 (2) by the device's own conversion; see `fp8_word`."""
    if M == 3:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 codes, low, high; .reg .b32 halves; cvt.rn.satfinite.e4m3x2.f32 codes, $3, $2; "
            "cvt.rn.f16x2.e4m3x2 halves, codes; mov.b32 {low, high}, halves; "
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,f,f", (a, b), (tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .b16 codes, low, high; .reg .b32 halves; cvt.rn.satfinite.e5m2x2.f32 codes, $3, $2; "
        "cvt.rn.f16x2.e5m2x2 halves, codes; mov.b32 {low, high}, halves; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
        "=f,=f,f,f", (a, b), (tl.float32, tl.float32), True, 1,
    )  # fmt: skip


@triton.jit
def with_sign(value, x):
    """Give a nonnegative float32 the sign of x."""
    return as_float(as_bits(value) | (as_bits(x) & SIGN))


@triton.jit
def round_fixed(steps, random, SR: tl.constexpr):
    """Round float32 numbers of steps to -127..127; return them as float32, and int32 whose low byte they are."""
    magnitude = tl.minimum(tl.abs(steps), 127.0)
    if SR > 0:
        whole = tl.floor(magnitude)
        magnitude = tl.where(rounds_up((magnitude - whole) * 4294967296.0, random, SR), whole + 1.0, whole)
    # The FP32 adder rounds to nearest: the last bit of 1.5 * 2^23 has the weight of a step.
    total = with_sign(magnitude, steps) + 12582912.0
    return total - 12582912.0, as_bits(total)


@triton.jit
def decode_float(word, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr):
    """Return the float32 values of codes in the highest bits of int32 (NaN codes give a finite value).

    Moved down to the place of a float32's lowest exponent bits, the exponent is off by a constant, which one exact
    product makes good; an arithmetic shift leaves the sign where it is.
    """
    mask: tl.constexpr = -0x80000000 | (((1 << TOP) - 1) << (23 - M))
    return as_float((word >> (8 + M - TOP)) & mask) * as_float(tl.full((), (253 + E) << 23, tl.int32))


@triton.jit
def power_of_two(code):
    """Return 2^(code - 127) as float32 for int32 E8M0 codes 0..254."""
    return as_float(tl.where(code == 0, 1 << 22, code << 23))


@triton.jit
def e8m0_value(code):
    """Return the float32 value of int32 E8M0 codes; 255 gives NaN."""
    return as_float(tl.where(code == 255, 0x7FC00000, as_bits(power_of_two(code))))


@triton.jit
def e4m3_value(code):
    """Return the float32 value of int32 E4M3 codes without sign; 0x7F gives NaN."""
    return as_float(tl.where(code == 0x7F, 0x7FC00000, as_bits(decode_float(code << 24, 3, -6, 7))))


@triton.jit
def scaled_e4m3(code, SHIFT: tl.constexpr, NATIVE: tl.constexpr):
    """Return `e4m3_value` times 2^SHIFT, by the device's own conversion if NATIVE."""
    if NATIVE:
        value = tl.inline_asm_elementwise(
            "{ .reg .b16 codes, low, high; .reg .b32 halves; cvt.u16.u32 codes, $1; cvt.rn.f16x2.e4m3x2 halves, codes; "
            "mov.b32 {low, high}, halves; cvt.f32.f16 $0, low; }",
            "=f,r", (code,), tl.float32, True, 1,
        )  # fmt: skip
    else:
        value = e4m3_value(code)
    return value * 2.0**SHIFT


@triton.jit
def encode_tensor_scale(amax):
    """Return the encode tensor scale of NVFP4; see `ops.reference.scales.encode_tensor_scale`."""
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, RANGE, tl.float32), amax), LARGEST)
    return tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)


@triton.jit
def reciprocal(x):
    """Return RN(1 / x)."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def sixth_of(encode):
    """Return what block amaxes are multiplied by, RN(encode / 6); 1/6 as a multiplier rounds up, as in TE."""
    return encode * SIXTH


@triton.jit
def nvfp4_scales(top, sixth, decode):
    """Return code (int32), value and element factor (float32) of E4M3 block scales.

    Args:
        top: int32 magnitude bits of the block amax; above those of the largest float32 the block is not finite.
        sixth: `sixth_of` the encode tensor scale, broadcastable to `top`.
        decode: decode tensor scale, likewise.
    """
    bad = top >= EXPONENT
    amax = as_float(tl.where(bad, 0, top))
    value, code = round_float(amax * sixth, amax, 3, -6, 0x43E00000, 0, True)
    code = code & 0x7F
    factor = tl.minimum(reciprocal(value * decode), LARGEST)
    return tl.where(bad, 0x7F, code), as_float(tl.where(bad, 0x7FC00000, as_bits(value))), factor


@triton.jit
def e8m0_scales(
    top,
    RULE: tl.constexpr,
    MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Return code (int32), value and element factor (float32) of E8M0 block scales.

    Args:
        top: int32 magnitude bits of the block amax.
        RULE: 0 floor, 1 ceil of a rounded product, 2 ceil by exact comparison; see `ops.reference.scales`.
        MAX: bits of the largest element value as float32.
        RECIPROCAL: one over that value.
        MAX_EXPONENT: its exponent.
        ZERO: code of a block of zeros.
    """
    bad = top >= EXPONENT
    if RULE == 1:
        # Rounded up to a power of two by carry; below 2^-127, which is code 0, nothing is left to carry. The product is
        # far from the largest exponent, so that neither end needs a clamp.
        ratio = as_bits(as_float(top) * RECIPROCAL)
        code = (tl.where(ratio > (1 << 22), ratio, 0) + 0x7FFFFF) >> 23
    else:
        top = tl.where(bad, 0, top)
        if RULE == 0:
            code = (top >> 23) - MAX_EXPONENT
        else:
            fraction: tl.constexpr = MAX & 0x7FFFFF
            exponent: tl.constexpr = (MAX >> 23) - 127
            code = (top >> 23) - exponent + ((top & 0x7FFFFF) > fraction).to(tl.int32)
            if exponent == 0:
                code = tl.where(top < 0x800000, (top > ((0x800000 + fraction) >> 1)).to(tl.int32), code)
        code = tl.minimum(tl.maximum(code, 0), 254)
        if ZERO > 0:
            code = tl.where(top == 0, ZERO, code)
    value = tl.where(bad, 0x7FC00000, tl.maximum(code << 23, 1 << 22))
    factor = tl.maximum((254 << 23) - (code << 23), 1 << 22)
    return tl.where(bad, 0xFF, code), as_float(value), as_float(factor)

"""Device functions on tiles of blocks: maxima, scales, random bits and rounding, shared by the kernels.

A tile has the shape (L, C, B): L rows of C blocks of B elements, whatever the order of its elements in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_nvfp4.ops.triton.device.elements import (
    INTERPRETED,
    MAGNITUDE,
    S2F6_STEP,
    S2F6_STEPS,
    SIGN,
    as_bits,
    decode_float,
    e4m3_value,
    e8m0_scales,
    e8m0_value,
    larger,
    nvfp4_scales,
    round_fixed,
    round_float,
    to_bf16,
    with_sign,
)
from lightning_nvfp4.ops.triton.device.hadamard import butterflies
from lightning_nvfp4.ops.triton.device.philox import philox_words, random_at


@triton.jit
def transform(x, SIGNS: tl.constexpr, N: tl.constexpr, L: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Apply the random Hadamard transform of length N along (C, B) and round to BF16 once; float32 in and out.

    Bit i of SIGNS set = element i of each 16 is negated; B is a multiple of 16.
    """
    half: tl.constexpr = 2.0 ** -((N.bit_length() - 1) // 2)
    after: tl.constexpr = 0.7071067811865476 if N == 32 or N == 128 else 1.0
    x = x * tl.where(_negated(SIGNS, B), -half, half)
    x = butterflies(tl.reshape(x, (L, C * B // N, N)), L, C * B // N, N)
    return tl.reshape(to_bf16(x * after), (L, C, B))


@triton.jit
def inverse(y, SIGNS: tl.constexpr, N: tl.constexpr, L: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Undo `transform` up to its rounding; float32 (L, C, B) in and out."""
    half: tl.constexpr = 2.0 ** -((N.bit_length() - 1) // 2)
    after: tl.constexpr = 0.7071067811865476 if N == 32 or N == 128 else 1.0
    x = butterflies(tl.reshape(y * half, (L, C * B // N, N)), L, C * B // N, N) * after
    return tl.reshape(x, (L, C, B)) * tl.where(_negated(SIGNS, B), -1.0, 1.0)


@triton.jit
def _negated(SIGNS: tl.constexpr, B: tl.constexpr):
    return ((SIGNS >> (tl.arange(0, B)[None, None, :] % 16)) & 1) == 1


@triton.jit
def load_blocks(at, inside, L: tl.constexpr, C: tl.constexpr, B: tl.constexpr, PART: tl.constexpr):
    """Load whole blocks of two or four parts (L, C, B) in a row, by the addresses (L, C, PART) of the first part.

    Rows that are not `inside`, (L, 1, 1) or (1, 1, 1), are zeros.

    A thread then holds all of a block, and works out its scale alone; one load would give it 16 bytes.
    """
    x = tl.join(tl.load(at, mask=inside, other=0), tl.load(at + PART, mask=inside, other=0))
    if B == 4 * PART:
        low, high = tl.load(at + 2 * PART, mask=inside, other=0), tl.load(at + 3 * PART, mask=inside, other=0)
        x = tl.join(x, tl.join(low, high))
        return tl.reshape(tl.permute(x, (0, 1, 4, 3, 2)), (L, C, B))
    else:
        return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (L, C, B))


@triton.jit
def top_along(x, AXIS: tl.constexpr):
    """Return the int32 magnitude bits of the largest float32 along a dim; NaN is above infinity."""
    if INTERPRETED:  # which reduces by other functions one element at a time
        return tl.max(as_bits(x) & MAGNITUDE, axis=AXIS)
    return as_bits(tl.reduce(x, AXIS, larger)) & MAGNITUDE


@triton.jit
def block_tops(x, ROWS: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    """Return the int32 magnitude bits (L, C) of the largest element of each block, of ROWS rows in 2D blocks."""
    return tile_tops(top_along(x, 2), ROWS, L, C)


@triton.jit
def tile_tops(top, ROWS: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    """Return the largest of blocks' int32 magnitude bits (L, C) for all ROWS rows of a 2D block."""
    if ROWS > 1:
        tile = tl.max(tl.reshape(top, (L // ROWS, ROWS, C)), axis=1, keep_dims=True)
        top = tl.reshape(tl.broadcast_to(tile, (L // ROWS, ROWS, C)), (L, C))
    return top


@triton.jit
def finite_top(x):
    """Return int32 magnitude bits of the largest finite element of each row (L,); 0 where there is none."""
    # Infinity and NaN wrap to negative numbers.
    shifted = (as_bits(x) & MAGNITUDE) + 0x00800000
    return tl.maximum(tl.max(tl.max(shifted, axis=2), axis=1), 0x00800000) - 0x00800000


@triton.jit
def random_tile(seed, base, sl, sk, AXIS: tl.constexpr, L: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Return uint32 random bits (L, C, B) of elements at row-major index base + l * sl + (c * B + b) * sk.

    One draw serves four elements next to each other along AXIS: 2 along the blocks, 0 across rows. Their indices start
    at a multiple of four.
    """
    c = tl.arange(0, C)[None, :, None]
    if AXIS == 2:
        l = tl.arange(0, L)[:, None, None]
        b = 4 * tl.arange(0, B // 4)[None, None, :]
    else:
        l = 4 * tl.arange(0, L // 4)[:, None, None]
        b = tl.arange(0, B)[None, None, :]
    draw = (base + l * sl + (c * B + b) * sk) >> 2
    w0, w1, w2, w3 = philox_words(seed, draw.to(tl.uint32), (draw >> 32).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    if AXIS == 0:
        words = tl.permute(words, (0, 3, 4, 1, 2))
    return tl.reshape(words, (L, C, B))


@triton.jit
def random_matrix(seed, base, stride, ALIGNED: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Return uint32 random bits (R, K) of elements at row-major index base + r * stride + k.

    One draw serves four columns if ALIGNED: base and stride are then multiples of four.
    """
    r = tl.arange(0, R)[:, None]
    if ALIGNED:
        four = 4 * tl.arange(0, K // 4)[None, :]
        draw = (base >> 2) + ((r * stride + four) >> 2)
        w0, w1, w2, w3 = philox_words(seed, draw.to(tl.uint32), (draw >> 32).to(tl.uint32))
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (R, K))
    return random_at(seed, base + r * stride + tl.arange(0, K)[None, :])


@triton.jit
def scales_of(
    top,
    sixth,
    decode,
    NV: tl.constexpr,
    RULE: tl.constexpr,
    MAX: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Return code (int32), value and element factor (float32), all (L, C), of the block scales.

    Args:
        top: int32 magnitude bits of the blocks (L, C).
        sixth: float32 `sixth_of` the encode tensor scale, broadcastable to (L, C); only for NVFP4.
        decode: float32 decode tensor scale, likewise.
    """
    if NV:
        return nvfp4_scales(top, sixth, decode)
    return e8m0_scales(top, RULE, MAX, RECIPROCAL, MAX_EXPONENT, ZERO)


@triton.jit
def round_tile(
    x,
    factor,
    scale,
    random,
    M: tl.constexpr,
    E: tl.constexpr,
    MAX: tl.constexpr,
    TOP: tl.constexpr,
    SR: tl.constexpr,
    SATURATE: tl.constexpr,
):
    """Return values in units of the tensor scale (float32) and codes in the highest bits of int32, both (L, C, B).

    M is -1 for the fixed-point S2F6. Blocks with a NaN scale have NaN values.
    """
    scaled = x * factor[:, :, None]
    if M == -1:
        value, code = round_fixed(scaled * S2F6_STEPS, random, SR)
        value = value * S2F6_STEP
        code = code << 24
    else:
        value, code = round_float(scaled, random, M, E, MAX, SR, SATURATE)
        value = with_sign(value, x)
        code = (code << (31 - TOP)) | (as_bits(x) & SIGN)
    return value * scale[:, :, None], code


@triton.jit
def pack(code, TOP: tl.constexpr, L: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Return int32 words of codes that stand in the highest bits of int32 (L, C, B), the first code lowest."""
    bits: tl.constexpr = TOP + 1
    words = _merge(code, bits, L, C, B // 2)
    words = _merge(words, 2 * bits, L, C, B // 4)
    if bits == 4:
        words = _merge(words, 16, L, C, B // 8)
    return words


@triton.jit
def bytes_of(words, L: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr):
    """Return the bytes (L, C, 4 * SIZE) of int32 words (L, C, SIZE), the lowest first."""
    byte = words[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]
    return tl.reshape(byte, (L, C, 4 * SIZE)).to(tl.uint8)


@triton.jit
def _merge(word, BITS: tl.constexpr, L: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr):
    low, high = tl.split(tl.reshape(word, (L, C, PAIRS, 2)))
    return high | shifted_down(low, BITS)


@triton.jit
def shifted_down(word, BITS: tl.constexpr):
    """Return int32 shifted right with zeros from the left."""
    return (word.to(tl.uint32, bitcast=True) >> BITS).to(tl.int32, bitcast=True)


@triton.jit
def decode_tile(code, scale_code, NV: tl.constexpr, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr):
    """Return float32 (L, C, B) codes times block scales; NaN in blocks that are not finite.

    Args:
        code: int32 (L, C, B), the codes in the highest bits.
        scale_code: int32 (L, C).
    """
    if NV:
        scale = e4m3_value(scale_code)
    else:
        scale = e8m0_value(scale_code)
    if M == -1:
        value = (code >> 24).to(tl.float32) * S2F6_STEP
    else:
        value = decode_float(code, M, E, TOP)
    return value * scale[:, :, None]

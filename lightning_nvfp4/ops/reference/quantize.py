"""Quantization in plain torch: the executable definition that every other backend must match bit for bit.

Shape letters: L leading dims of the moved tensor, K its length, C blocks of a row, B block length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.formats.block import BLOCK_FORMATS
from lightning_nvfp4.formats.element import ELEMENTS, S2F6
from lightning_nvfp4.formats.rounding import FP32_EXPONENT
from lightning_nvfp4.ops.layout import (
    block_of,
    from_blocks,
    num_elements,
    pack_nibbles,
    pad_last,
    per_expert,
    stored_length,
    tile_amax,
    to_blocks,
    unpack_nibbles,
)
from lightning_nvfp4.ops.reference import hadamard, philox
from lightning_nvfp4.ops.reference.elements import (
    decode_float,
    encode_float,
    power_of_two,
    round_fixed,
    round_float,
)
from lightning_nvfp4.ops.reference.four_over_six import choose_scales
from lightning_nvfp4.ops.reference.scales import (
    BlockScales,
    decode_tensor_scale,
    encode_tensor_scale,
    exponent_scales,
    finite_amax,
    magnitude_bits,
    nvfp4_scales,
)
from lightning_nvfp4.recipe import QuantSpec


def quantize_blocks(
    x: Tensor, spec: QuantSpec, dim: int, seed: int | Tensor, amax: Tensor | None
) -> tuple[Tensor, BlockScales, Tensor | None, Tensor | None]:
    """Round a tensor to its grid.

    Args:
        x: any floating-point dtype, at least one dim, not empty.
        spec: the format.
        dim: the quantized dim, non-negative.
        seed: for stochastic rounding.
        amax: explicit amax of the tensor scale, broadcastable to (L, C), or ``None``.

    Returns:
        Rounded elements, float32 (L, C, B), in units of their block scale; the block scales (L, C); the decode
        tensor scale and the amax it comes from (``None`` for formats without).
    """
    x_LK = prepare(x, spec, dim)
    rows, length = block_of(spec)
    x_LCB = to_blocks(x_LK, length).contiguous()
    top_LC = tile_amax(magnitude_bits(x_LCB).amax(-1), rows)
    encode = None
    if spec.format == "nvfp4":
        amax = tensor_amax(x_LK, spec, dim) if amax is None else amax
        encode = encode_tensor_scale(amax, spec)
    if encode is None:
        scales = exponent_scales(top_LC, spec)
    elif spec.four_over_six:
        assert amax is not None
        scales = choose_scales(x_LCB, top_LC, amax, encode, spec)
    else:
        scales = nvfp4_scales(top_LC, encode)
    random_LCB = None
    if spec.rounding == "stochastic":
        random_LCB = to_blocks(random_bits(x, spec, dim, seed), length)
    scaled = x_LCB * scales.factor.unsqueeze(-1)
    element = ELEMENTS[spec.element or ""]
    if element is S2F6:
        steps = scaled * 2.0**element.mantissa_bits
        rounded = round_fixed(steps, element.max_code, random_LCB, spec.sr_bits) * 2.0**-element.mantissa_bits
    else:
        rounded = round_float(scaled, element, random_LCB, spec.sr_bits)
    return rounded, scales, None if encode is None else decode_tensor_scale(encode), amax


def prepare(x: Tensor, spec: QuantSpec, dim: int) -> Tensor:
    """Return x as float32 with the quantized dim last and, under RHT, padded and transformed."""
    x_LK = x.detach().movedim(dim, -1).to(torch.float32).resolve_neg()
    return hadamard.transform(pad_last(x_LK, spec.hadamard), spec) if spec.hadamard else x_LK


def tensor_amax(x_LK: Tensor, spec: QuantSpec, dim: int) -> Tensor:
    """Return the amax of the tensor scale: (L, 1) per row, (E, 1, 1) per expert of 3D weights, else ()."""
    if spec.tensor_scale == "row":
        return finite_amax(x_LK, -1, keepdim=True)
    if per_expert(x_LK.ndim, dim):
        return finite_amax(x_LK, (-2, -1), keepdim=True)
    return finite_amax(x_LK)


def random_bits(x: Tensor, spec: QuantSpec, dim: int, seed: int | Tensor) -> Tensor:
    """Return int32 random bits in x's moved layout, drawn by the row-major index of each element in x.

    Elements that a transform of a padded row adds are numbered after those of x, in the moved layout.
    """
    moved = x.movedim(dim, -1)
    added = stored_length(moved.shape[-1], spec) - moved.shape[-1]
    count, total = x.numel(), x.numel() + num_elements(tuple(moved.shape[:-1])) * added
    counter = torch.arange(philox.num_draws(total), dtype=torch.int64, device=x.device)
    words = philox.draw(philox.seed_tensor(seed, x.device), counter).flatten()
    bits = words[:count].reshape(x.shape).movedim(dim, -1)
    return torch.cat((bits, words[count:total].reshape(*moved.shape[:-1], added)), dim=-1) if added else bits


def quantize_packed(
    x: Tensor, spec: QuantSpec, dim: int, seed: int | Tensor, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return codes, scale codes (uint8), decode tensor scale and amax; arguments as `quantize_blocks`."""
    rounded, scales, tensor_scale, amax = quantize_blocks(x, spec, dim, seed, amax)
    codes = encode_blocks(rounded, scales, spec, stored_length(x.shape[dim], spec))
    return codes, scales.code.to(torch.uint8), tensor_scale, amax


def quantize_unpacked(
    x: Tensor, spec: QuantSpec, dim: int, seed: int | Tensor, amax: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return values (elements times block scale, float32), the decode tensor scale and its amax."""
    rounded, scales, tensor_scale, amax = quantize_blocks(x, spec, dim, seed, amax)
    values = rounded * scales.value.unsqueeze(-1)
    return from_blocks(values, stored_length(x.shape[dim], spec)), tensor_scale, amax


def encode_blocks(rounded_LCB: Tensor, scales: BlockScales, spec: QuantSpec, length: int) -> Tensor:
    """Return the stored codes: uint8, two a byte for E2M1; int8 for S2F6. Blocks that are not finite hold 0."""
    element = ELEMENTS[spec.element or ""]
    if element is S2F6:
        integers = (rounded_LCB * 2.0**element.mantissa_bits).to(torch.int32)
    else:
        integers = encode_float(rounded_LCB, element)
    bad_LC = (scales.value.view(torch.int32) & FP32_EXPONENT) == FP32_EXPONENT
    flat = from_blocks(integers.masked_fill(bad_LC.unsqueeze(-1), 0), length)
    if element is S2F6:
        return flat.to(torch.int8)
    return pack_nibbles(flat) if element.bits == 4 else flat.to(torch.uint8)


def decode(codes: Tensor, block_scale: Tensor, spec: QuantSpec, length: int) -> Tensor:
    """Return float32 (L, length): codes times block scales, NaN in blocks that are not finite."""
    element, scale = ELEMENTS[spec.element or ""], BLOCK_FORMATS[spec.format].scale
    if element is S2F6:
        grid = codes.to(torch.float32) * 2.0**-element.mantissa_bits
    else:
        grid = decode_float(unpack_nibbles(codes, length) if element.bits == 4 else codes, element)
    if scale.kind == "exponent":
        values = power_of_two(block_scale.to(torch.int32))
    else:
        values = decode_float(block_scale, scale)
    return from_blocks(to_blocks(grid, block_of(spec)[1]) * values.unsqueeze(-1), length)

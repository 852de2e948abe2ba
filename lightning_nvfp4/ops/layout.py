"""Layouts: the quantized dim moved last, padded with zeros to whole blocks, cut into blocks and back.

Shape letters: L leading dims (of a moved tensor, all but the last), K its length, B block length, C = ceil(K / B).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_nvfp4.recipe import QuantSpec


def normalize_dim(dim: int, ndim: int) -> int:
    """Return `dim` as a non-negative index."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim = {dim} is outside of a tensor with {ndim} dims: use {-ndim} to {ndim - 1}.")
    return dim % ndim


def stored_length(length: int, spec: QuantSpec) -> int:
    """Return how many codes a row of `length` elements has: whole transforms under RHT, else `length`."""
    return -(-length // spec.hadamard) * spec.hadamard if spec.hadamard else length


def num_blocks(length: int, spec: QuantSpec) -> int:
    """Return how many block scales a row of `length` elements has."""
    return -(-stored_length(length, spec) // block_of(spec)[1])


def block_of(spec: QuantSpec) -> tuple[int, int]:
    """Return the rows and the length of a block."""
    rows, length = spec.block or (1, 0)
    return rows, length


def pad_last(x: Tensor, multiple: int) -> Tensor:
    """Append zeros along the last dim up to a multiple; a tensor that fits is returned as it is."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def to_blocks(x_LK: Tensor, length: int) -> Tensor:
    """Return (L, C, B) blocks, the last one padded with zeros."""
    return pad_last(x_LK, length).unflatten(-1, (-1, length))


def from_blocks(x_LCB: Tensor, length: int) -> Tensor:
    """Undo `to_blocks` for rows of `length` elements."""
    return x_LCB.flatten(-2)[..., :length]


def tile_amax(top_LC: Tensor, rows: int) -> Tensor:
    """Reduce a per-row maximum over tiles of `rows` rows (second last dim) and repeat it in each of them.

    Args:
        top_LC: (..., rows, C) nonnegative numbers; 1D input is one row.
        rows: rows of a tile; 1 returns the input.
    """
    if rows == 1:
        return top_LC
    if top_LC.ndim == 1:
        return top_LC
    num = top_LC.shape[-2]
    tiles = -(-num // rows)
    padded = torch.nn.functional.pad(top_LC, (0, 0, 0, tiles * rows - num))
    top = padded.unflatten(-2, (tiles, rows)).amax(-2, keepdim=True)
    return top.expand(*top.shape[:-2], rows, top.shape[-1]).flatten(-3, -2)[..., :num, :]


def pack_nibbles(codes_LK: Tensor) -> Tensor:
    """Return uint8 (L, ceil(K / 2)): element 2i in the low four bits, 2i + 1 in the high ones."""
    codes = pad_last(codes_LK, 2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, length: int) -> Tensor:
    """Return int32 (L, length) codes of `pack_nibbles`."""
    packed = packed.to(torch.int32)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :length]


def expand_scale(scale: Tensor, shape_LC: torch.Size, spec: QuantSpec, length: int) -> Tensor:
    """Return a scale that broadcasts to block scales (L, C) as one that broadcasts to values (L, length)."""
    if scale.ndim == 0 or scale.shape[-1] == 1:
        return scale
    per_block = scale.expand(*scale.shape[:-1], shape_LC[-1])
    return per_block.repeat_interleave(block_of(spec)[1], dim=-1)[..., :length]


def num_elements(shape: tuple[int, ...]) -> int:
    """Return the product of a shape."""
    return math.prod(shape)


def per_expert(ndim: int, dim: int) -> bool:
    """Return whether a tensor is a stack of expert weights, quantized within the experts."""
    return ndim == 3 and dim != 0


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)

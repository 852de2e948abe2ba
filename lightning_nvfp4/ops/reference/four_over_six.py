"""Four over six: per block, let the largest element become 6 or 4, whichever loses less.

Follows Transformer Engine's exact-error rule with block scales bounded by 256: both candidates are quantized,
errors are summed in FP32 element by element, and 4 wins only when its error is smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_nvfp4.formats.block import FOUR_OVER_SIX_RANGE, FOUR_OVER_SIX_RATIO
from lightning_nvfp4.formats.element import E2M1, E4M3
from lightning_nvfp4.formats.rounding import FP32_EXPONENT
from lightning_nvfp4.ops.layout import block_of
from lightning_nvfp4.ops.reference.elements import encode_float, round_float
from lightning_nvfp4.ops.reference.scales import BlockScales, decode_tensor_scale, element_factor, finish
from lightning_nvfp4.recipe import QuantSpec


def choose_scales(x_LCB: Tensor, top_LC: Tensor, amax: Tensor, encode: Tensor, spec: QuantSpec) -> BlockScales:
    """Return the better of the two scales of each block (of each 16x16 tile, if blocks are 2D).

    Args:
        x_LCB: float32 blocks.
        top_LC: int32 magnitude bits of the block (or tile) amax.
        amax: float32 amax of the tensor scale, broadcastable to (L, C).
        encode: its encode tensor scale.
        spec: names the error, ``mae`` or ``mse``.
    """
    bad = top_LC >= FP32_EXPONENT
    block_amax = top_LC.masked_fill(bad, 0).view(torch.float32)
    base = torch.div(block_amax, torch.full_like(block_amax, E2M1.max)) * encode
    decode = decode_tensor_scale(encode)
    amax_LC = amax.expand(top_LC.shape)
    six = round_float(base, E4M3)
    four = round_float(base * FOUR_OVER_SIX_RATIO, E4M3)
    errors = [_error(x_LCB, scale, element_factor(scale, decode), amax_LC, spec) for scale in (six, four)]
    value = torch.where(errors[1] < errors[0], four, six)
    return finish(encode_float(value, E4M3), value, element_factor(value, decode), bad, E4M3)


def _error(x_LCB: Tensor, scale_LC: Tensor, factor_LC: Tensor, amax_LC: Tensor, spec: QuantSpec) -> Tensor:
    """Return the error of one candidate, summed over the block in the order of its elements."""
    values = round_float(x_LCB * factor_LC.unsqueeze(-1), E2M1)
    scaled = (values * scale_LC.unsqueeze(-1)) * amax_LC.unsqueeze(-1)
    difference = torch.div(scaled, torch.full_like(scaled, FOUR_OVER_SIX_RANGE)) - x_LCB
    terms = difference.abs() if spec.four_over_six == "mae" else difference * difference
    total = terms[..., 0]
    for i in range(1, terms.shape[-1]):
        total = total + terms[..., i]
    rows = block_of(spec)[0]
    return total if rows == 1 or total.ndim == 1 else _sum_tile_rows(total, rows)


def _sum_tile_rows(total_LC: Tensor, rows: int) -> Tensor:
    """Add the rows of each tile pairwise (r with r + 8, then + 4, + 2, + 1); every row gets the tile's sum."""
    num = total_LC.shape[-2]
    padded = torch.nn.functional.pad(total_LC, (0, 0, 0, -num % rows)).unflatten(-2, (-1, rows))
    half = rows // 2
    tree = padded
    while half:
        tree = tree[..., :half, :] + tree[..., half : 2 * half, :]
        half //= 2
    return tree.expand(padded.shape).flatten(-3, -2)[..., :num, :]

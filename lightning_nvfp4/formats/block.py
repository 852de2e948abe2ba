"""Block formats as data: how elements share a scale.

Sources: arXiv:2509.25149 and Transformer Engine (NVFP4, block-scaled FP8), OCP MX v1.0 (MXFP8, MXINT8 = S2F6).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_nvfp4.formats.element import E2M1, E4M3, E5M2, E8M0, S2F6, ElementFormat


@dataclass(frozen=True)
class BlockFormat:
    """One block format.

    Attributes:
        name: as recipes write it.
        elements: element types it can hold, the default first.
        scale: element type of the block scale.
        length: elements that share a scale, along the quantized dim.
        codes_per_byte: codes packed in a byte, low bits first.
        has_tensor_scale: whether an FP32 scale stands outside the block scales.
        zero_block_scale: code of the scale of a block of zeros.
    """

    name: str
    elements: tuple[ElementFormat, ...]
    scale: ElementFormat
    length: int
    codes_per_byte: int
    has_tensor_scale: bool
    zero_block_scale: int

    @property
    def bits_per_element(self) -> float:
        """Stored bits of one element, its share of the block scale included."""
        return 8 / self.codes_per_byte + self.scale.bits / self.length


NVFP4 = BlockFormat("nvfp4", (E2M1,), E4M3, 16, codes_per_byte=2, has_tensor_scale=True, zero_block_scale=0)
MXFP8 = BlockFormat("mxfp8", (E4M3, E5M2), E8M0, 32, codes_per_byte=1, has_tensor_scale=False, zero_block_scale=0)
MXS2F6 = BlockFormat("s2f6", (S2F6,), E8M0, 32, codes_per_byte=1, has_tensor_scale=False, zero_block_scale=0)
FP8_BLOCK = BlockFormat(
    "fp8_block", (E4M3, E5M2), E8M0, 128, codes_per_byte=1, has_tensor_scale=False, zero_block_scale=E8M0.bias
)

BLOCK_FORMATS = {block.name: block for block in (NVFP4, MXFP8, MXS2F6, FP8_BLOCK)}

NVFP4_RANGE = E2M1.max * E4M3.max
"""Largest value codes and block scales of NVFP4 can express together: the tensor scale maps amax to it."""

FOUR_OVER_SIX_SCALE_MAX = 256.0
"""Bound of the block scales under four-over-six: leaves room for the scale of a block that ends at 4 (x 1.5)."""

FOUR_OVER_SIX_RANGE = E2M1.max * FOUR_OVER_SIX_SCALE_MAX
FOUR_OVER_SIX_RATIO = 1.5
"""Scale of a block whose largest element becomes 4, over the scale where it becomes 6."""

HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's random signs of the 16-point transform (bit mask 0xD7E8, set = negative)."""

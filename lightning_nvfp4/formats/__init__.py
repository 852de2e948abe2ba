"""What the bits mean: element types, block formats and the numbers of the random generator, as plain data.

Standard library only, so that a recipe can be checked and documented where torch is not installed. Every number
constant of a format is typed here once; the rest of the package reads the fields.
"""

from lightning_nvfp4.formats.block import BLOCK_FORMATS, HADAMARD_SIGNS, BlockFormat
from lightning_nvfp4.formats.element import E2M1, E4M3, E5M2, E8M0, ELEMENTS, S2F6, ElementFormat

__all__ = [
    "BLOCK_FORMATS",
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "ELEMENTS",
    "HADAMARD_SIGNS",
    "S2F6",
    "BlockFormat",
    "ElementFormat",
]

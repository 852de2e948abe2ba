"""Element types as data: what one code means.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0, OCP 8-bit Floating Point v1.0 for E4M3 and E5M2,
PTX ISA 9.1 section 5.2.4 for S2F6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class ElementFormat:
    """One element type.

    Attributes:
        name: lower-case name as recipes write it.
        bits: width of a code.
        kind: ``float`` (sign, exponent, mantissa), ``exponent`` (a power of two, no sign) or ``fixed`` (two's
            complement with `mantissa_bits` fraction bits).
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the fraction field.
        bias: exponent bias.
        max_code: the code of the largest finite value, sign bit clear.
        nan_code: the canonical code of NaN, or ``None`` where the type has none.
    """

    name: str
    bits: int
    kind: Literal["float", "exponent", "fixed"]
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None

    def decode(self, code: int) -> float:
        """Return the value of a code given as an unsigned integer of `bits` bits."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{self.name} has codes 0 to {(1 << self.bits) - 1}, not {code}.")
        if self.kind == "fixed":
            signed = code - (1 << self.bits) if code >> (self.bits - 1) else code
            return math.ldexp(signed, -self.mantissa_bits)
        if self.kind == "exponent":
            return math.nan if code == self.nan_code else math.ldexp(1.0, code - self.bias)
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        if magnitude > self.max_code:
            infinity = self.name == "e5m2" and magnitude == self.max_code + 1
            return sign * (math.inf if infinity else math.nan)
        exponent, fraction = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        significand = fraction + (1 << self.mantissa_bits if exponent else 0)
        return sign * math.ldexp(significand, max(exponent, 1) - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Value of every code, in code order."""
        return tuple(self.decode(code) for code in range(1 << self.bits))

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return self.decode(self.max_code)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; below it the grid is uniform."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (emax of the OCP floor rule)."""
        return math.frexp(self.max)[1] - 1


E2M1 = ElementFormat("e2m1", 4, "float", exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7, nan_code=None)
E4M3 = ElementFormat("e4m3", 8, "float", exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F)
E5M2 = ElementFormat("e5m2", 8, "float", exponent_bits=5, mantissa_bits=2, bias=15, max_code=0x7B, nan_code=0x7F)
E8M0 = ElementFormat("e8m0", 8, "exponent", exponent_bits=8, mantissa_bits=0, bias=127, max_code=0xFE, nan_code=0xFF)
S2F6 = ElementFormat("s2f6", 8, "fixed", exponent_bits=0, mantissa_bits=6, bias=0, max_code=0x7F, nan_code=None)

ELEMENTS = {element.name: element for element in (E2M1, E4M3, E5M2, E8M0, S2F6)}

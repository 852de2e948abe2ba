"""Names of the roundings, the layout of binary32 they are computed in, and the constants of the random generator.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

NEAREST = "nearest"
STOCHASTIC = "stochastic"

FP32_MANTISSA_BITS = 23
FP32_BIAS = 127
FP32_SIGN = -(1 << 31)
"""Sign bit of binary32 as an int32."""
FP32_MAGNITUDE = (1 << 31) - 1
FP32_EXPONENT = 0xFF << FP32_MANTISSA_BITS
"""Exponent field; also the bits of infinity, above which are only NaNs."""
FP32_FRACTION = (1 << FP32_MANTISSA_BITS) - 1
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_WORDS = 4
"""32-bit words of one draw: element i takes word i % 4 of the draw at counter i // 4."""

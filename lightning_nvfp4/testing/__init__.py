"""Assertions for number formats: what a quantizer, a kernel or a codec can honestly be held to.

They need no test framework, name the first place that differs with both values, and raise `AssertionError`.
"""

from lightning_nvfp4.testing.bits import assert_codes_equal, assert_scales_equal, assert_values_equal
from lightning_nvfp4.testing.statistics import assert_unbiased, assert_within_steps, sqnr_db

__all__ = [
    "assert_codes_equal",
    "assert_scales_equal",
    "assert_unbiased",
    "assert_values_equal",
    "assert_within_steps",
    "sqnr_db",
]

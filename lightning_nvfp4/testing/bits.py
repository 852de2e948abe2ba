"""Exact comparisons."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_codes_equal(actual: Tensor, expected: Tensor, where: Tensor | None = None, name: str = "codes") -> None:
    """Demand equal integers.

    Args:
        actual: integer tensor.
        expected: integer tensor of the same shape.
        where: boolean mask of the entries to compare, all by default.
        name: what the message calls them.

    Raises:
        AssertionError: with the number of differences, the first coordinate and both entries there.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}.")
    different = actual.to(torch.int64) != expected.to(torch.int64)
    if where is not None:
        different &= where
    count = int(different.sum())
    if count:
        at = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {count} of {different.numel()} differ, first at {at}: {int(actual[at]):#x} is not "
            f"{int(expected[at]):#x}."
        )


def assert_scales_equal(actual: Tensor, expected: Tensor, where: Tensor | None = None) -> None:
    """Demand equal scale bytes; arguments as `assert_codes_equal`."""
    assert_codes_equal(actual, expected, where, "block scales")


def assert_values_equal(actual: Tensor, expected: Tensor, name: str = "values") -> None:
    """Demand equal floating-point bits, except that any NaN equals any NaN.

    Raises:
        AssertionError: with the number of differences, the first coordinate and both values there.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}."
        )
    integer = _INTEGERS[actual.element_size()]
    different = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    different &= ~(actual.isnan() & expected.isnan())
    count = int(different.sum())
    if count:
        at = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {count} of {different.numel()} differ, first at {at}: {actual[at].item()!r} is not "
            f"{expected[at].item()!r}."
        )

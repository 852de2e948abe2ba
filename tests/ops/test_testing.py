"""The shipped assertions fail when they should, and say where."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_nvfp4.testing import (
    assert_codes_equal,
    assert_scales_equal,
    assert_unbiased,
    assert_values_equal,
    assert_within_steps,
    sqnr_db,
)


def test_codes_name_the_first_place_and_both_values() -> None:
    a, b = torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    assert_codes_equal(a, b)
    b[1, 2] = 7
    with pytest.raises(AssertionError, match=r"1 of 6 differ, first at \(1, 2\): 0x0 is not 0x7"):
        assert_codes_equal(a, b)
    with pytest.raises(AssertionError, match="block scales"):
        assert_scales_equal(a, b)
    assert_codes_equal(a, b, where=b == 0)
    with pytest.raises(AssertionError, match="shape"):
        assert_codes_equal(a, b[:1])


def test_values_compare_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert_values_equal(nan, -nan)
    with pytest.raises(AssertionError, match="0.0 is not -0.0"):
        assert_values_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError, match="float64"):
        assert_values_equal(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def test_within_steps() -> None:
    x = torch.tensor([1.0, 2.0])
    assert_within_steps(x, x + 0.5, 0.5)
    with pytest.raises(AssertionError, match=r"first at \(1,\)"):
        assert_within_steps(x, torch.tensor([1.0, 2.6]), 0.5)
    with pytest.raises(AssertionError, match="nan"):
        assert_within_steps(torch.tensor([float("nan")]), torch.tensor([1.0]), 9.0)


def test_sqnr() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(x + torch.tensor([0.3, 0.4]), x) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(x, torch.zeros(2)) == -math.inf


def test_unbiased_counts() -> None:
    draws, p = 10_000, torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert_unbiased(torch.tensor([0, 2510, 4990, 10_000]), draws, p)
    with pytest.raises(AssertionError, match="row 1 went away 2800"):
        assert_unbiased(torch.tensor([0, 2800, 5000, 10_000]), draws, p)
    with pytest.raises(AssertionError, match="row 0 went away 1 "):
        assert_unbiased(torch.tensor([1, 2500, 5000, 10_000]), draws, p)
    with pytest.raises(AssertionError, match="binomial"):
        assert_unbiased(torch.full((400,), 5150), draws, torch.full((400,), 0.5))

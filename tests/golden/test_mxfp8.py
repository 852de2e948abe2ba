"""MXFP8 against Transformer Engine's host reference (ceil rule) and torchao (floor rule), byte for byte."""

from __future__ import annotations

import pytest
from torch import Tensor

from lightning_nvfp4.ops import quantize
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_scales_equal

FINITE = ("bf16", "fp32", "boundary", "pow2")


def spec_of(element: str, **fields: object) -> QuantSpec:
    return QuantSpec("mxfp8", element=element, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", FINITE)
def test_ceil_rule_in_both_directions(golden, case: str, element: str) -> None:
    t, name = golden("mxfp8"), f"{case}.{element}"
    rows = quantize(t[f"{case}.x"], spec_of(element))
    assert_codes_equal(rows.codes, t[f"{name}.te_rowwise_data"])
    assert_scales_equal(rows.block_scale, t[f"{name}.te_rowwise_scale"])
    columns = quantize(t[f"{case}.x"], spec_of(element), dim=0)
    assert_codes_equal(columns.codes.T, t[f"{name}.te_columnwise_data"])
    assert_scales_equal(columns.block_scale.T, t[f"{name}.te_columnwise_scale"])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("case", FINITE)
def test_floor_rule(golden, case: str, element: str) -> None:
    t, name = golden("mxfp8"), f"{case}.{element}.torchao_floor"
    q = quantize(t[f"{case}.x"], spec_of(element, scale_rule="floor"))
    assert_scales_equal(q.block_scale, t[f"{name}_scale"])
    # Where the scale code is 0 torchao divides by 2^-126 instead of the 2^-127 it stores.
    normal = (q.block_scale > 0).repeat_interleave(32, dim=-1)
    assert_codes_equal(q.codes, t[f"{name}_data"], where=normal)
    assert normal.any()


def test_square_blocks(golden) -> None:
    t = golden("mxfp8")
    q = quantize(t["te2d.x"], QuantSpec("mxfp8", block=(32, 32)))
    assert_codes_equal(q.codes, t["te2d.e4m3.rowwise_data"])
    assert_scales_equal(q.block_scale, t["te2d.e4m3.rowwise_scale"])
    columns = quantize(t["te2d.x"], QuantSpec("mxfp8", block=(32, 32)), dim=0)
    assert_codes_equal(columns.codes.T, t["te2d.e4m3.columnwise_data"])


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_special_values_in_finite_blocks(golden, element: str) -> None:
    t, name = golden("mxfp8"), f"special.{element}"
    x = t["special.x"]
    q = quantize(x, spec_of(element))
    finite = x.isfinite().all(-1, keepdim=True)
    assert_scales_equal(q.block_scale, t[f"{name}.te_rowwise_scale"], where=finite)
    assert_codes_equal(q.codes, t[f"{name}.te_rowwise_data"], where=finite.expand(x.shape))
    assert bool((q.block_scale[~finite] == 0xFF).all()) and 0 < int((~finite).sum()) < len(x)


def test_boundaries_decide_between_neighbouring_scales(golden) -> None:
    scales: Tensor = golden("mxfp8")["boundary.e4m3.te_rowwise_scale"]
    assert len(scales.unique()) > 20, "the case should walk over many exponents"

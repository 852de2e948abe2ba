"""Laws that hold for every format."""

from __future__ import annotations

import pytest
import torch
from contract.formats import ALL, SPECS, STOCHASTIC, normal

from lightning_nvfp4.formats import BLOCK_FORMATS, ELEMENTS
from lightning_nvfp4.ops import QuantizedTensor, quantize, quantize_values
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_scales_equal, assert_values_equal, sqnr_db

SHAPES = [(1,), (7,), (33,), (1, 1), (3, 17), (16, 32), (40, 130), (2, 5, 48), (3, 20, 40), (2, 3, 5, 16)]
EMPTY = [(0,), (0, 16), (4, 0), (0, 8, 16), (3, 0, 16)]
EXPECTED_SQNR = {"e2m1": 17.5, "e4m3": 29.0, "e5m2": 23.0, "s2f6": 38.0}

each_spec = pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
each_nearest = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_stochastic = pytest.mark.parametrize("spec", STOCHASTIC.values(), ids=STOCHASTIC)


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert_codes_equal(a.codes, b.codes)
    assert_scales_equal(a.block_scale, b.block_scale)
    assert (a.tensor_scale is None) == (b.tensor_scale is None)
    if a.tensor_scale is not None and b.tensor_scale is not None:
        assert_values_equal(a.tensor_scale, b.tensor_scale, "tensor scale")


@each_spec
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_the_codes_decoded(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    for dim in range(len(shape)):
        q = quantize(x, spec, dim=dim, seed=3)
        values, tensor_scale = quantize_values(x, spec, dim=dim, seed=3)
        # A code of S2F6 has no negative zero, and neither have its values.
        assert_values_equal(values, q.operand())
        assert (tensor_scale is None) == (q.tensor_scale is None)
        moved = x.movedim(dim, -1)
        assert q.length == values.shape[dim] >= x.shape[dim]
        assert_values_equal(q.unscaled_values(), values.movedim(dim, -1))
        assert q.block_scale.shape == (*moved.shape[:-1], -(-q.length // q.spec.block[1]))  # pyright: ignore
        assert q.dequantize().shape == x.shape and q.dequantize(torch.bfloat16).dtype == torch.bfloat16


@each_nearest
def test_quality(spec: QuantSpec) -> None:
    x = normal(64, 256)
    expected = EXPECTED_SQNR[spec.element or ""] - (1.5 if (spec.block or (1, 1))[0] > 1 else 0.0)
    for dim in (0, 1):
        assert sqnr_db(quantize(x, spec, dim=dim).dequantize(), x) > expected


@each_nearest
def test_decoding_then_encoding_again_changes_nothing(spec: QuantSpec) -> None:
    # Each format reads its own values back from the grid; a transform or a choice between scales leaves that grid.
    if spec.hadamard or spec.four_over_six:
        spec = QuantSpec(**{**vars(spec), "hadamard": 0, "four_over_six": None})
    q = quantize(normal(48, 128), spec)
    values, scale = q.unscaled_values(), q.amax
    # amax is given, because the largest element itself may have been rounded.
    decoded = values.double() if q.tensor_scale is None else values.double() * q.tensor_scale.double()
    again = quantize(decoded.float(), spec, amax=scale)
    if q.tensor_scale is None:
        assert_values_equal(again.unscaled_values().abs(), values.abs())
    else:
        assert sqnr_db(again.dequantize(), q.dequantize()) > 35.0


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp8-e5m2", "s2f6-plain", "fp8"])
def test_every_code_survives(name: str) -> None:
    """A block that holds the largest value and each code in turn is read back code for code."""
    spec = SPECS[name]
    element, length = ELEMENTS[spec.element or ""], BLOCK_FORMATS[spec.format].length
    usable = [v for v in element.values if abs(v) <= element.max]
    x = torch.zeros(len(usable), length)
    x[:, 0], x[:, 1] = element.max, torch.tensor(usable)
    amax = torch.tensor(element.max * 448.0) if spec.format == "nvfp4" else None
    q = quantize(x, spec, amax=amax)
    assert_values_equal(q.unscaled_values() * (1.0 if q.tensor_scale is None else q.tensor_scale), x)
    assert len(q.codes[:, :2].reshape(len(usable), -1).unique(dim=0)) == len(usable)


@each_nearest
@pytest.mark.parametrize("exponent", [-40, -3, 1, 25])
def test_a_power_of_two_moves_only_the_outermost_scale(spec: QuantSpec, exponent: int) -> None:
    x = normal(32, 160)
    q, scaled = quantize(x, spec), quantize(x * 2.0**exponent, spec)
    assert_codes_equal(scaled.codes, q.codes)
    if q.tensor_scale is None:
        assert_scales_equal(scaled.block_scale, (q.block_scale.int() + exponent).to(torch.uint8))
    else:
        assert scaled.tensor_scale is not None
        assert_scales_equal(scaled.block_scale, q.block_scale)
        assert_values_equal(scaled.tensor_scale, q.tensor_scale * 2.0**exponent)


@pytest.mark.parametrize("name", ["nvfp4-2d", "mxfp8-2d", "fp8-2d"])
def test_square_blocks_commute_with_the_transpose(name: str) -> None:
    x = normal(128, 256)
    rows, columns = (quantize(x, SPECS[name], dim=dim).dequantize() for dim in (1, 0))
    assert_values_equal(rows, columns)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8"])
def test_blocks_of_a_row_do_not(name: str) -> None:
    # A power-of-two scale shows only in elements near the bottom of the range.
    x = normal(128, 256) * (torch.arange(128).unsqueeze(1) % 5 * -4.0).exp2()
    assert not torch.equal(*(quantize(x, SPECS[name], dim=dim).dequantize() for dim in (1, 0)))


@each_spec
def test_padding_equals_zeros_appended(spec: QuantSpec) -> None:
    # Rows are whole tiles and the added columns are drawn apart, so that only the padding differs.
    x = normal(128, 100)
    if spec.rounding == "stochastic":
        spec = QuantSpec(**{**vars(spec), "rounding": "nearest"})
    padded = torch.nn.functional.pad(x, (0, 28))
    q, whole = quantize(x, spec), quantize(padded, spec)
    assert_values_equal(q.dequantize(), whole.dequantize()[:, :100])
    assert q.codes.numel() < whole.codes.numel() or spec.hadamard


@each_spec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_is_nan_and_alone(spec: QuantSpec, bad: float) -> None:
    x = normal(256, 256)
    clean = quantize(x, spec, seed=1)
    poisoned = x.clone()
    poisoned[5, 70] = bad
    # The clean tensor's amax with the element taken out: what an amax over finite elements sees.
    out = x.clone()
    out[5, 70] = 0.0
    reference = quantize(out, spec, seed=1)
    q = quantize(poisoned, spec, seed=1)
    scale = BLOCK_FORMATS[spec.format].scale
    assert spec.block is not None
    length = max(spec.block[1], spec.hadamard or 0)
    rows = torch.arange(256) // spec.block[0] == 5 // spec.block[0]
    columns = torch.arange(256) // length == 70 // length
    inside = rows.unsqueeze(1) & columns
    decoded = q.dequantize()
    assert bool(decoded[inside].isnan().all()) and not bool(decoded[~inside].isnan().any())
    blocks = inside.unflatten(-1, (-1, spec.block[1])).any(-1)
    assert bool((q.block_scale[blocks] == scale.nan_code).all()) and not bool(
        (q.block_scale[~blocks] == scale.nan_code).any()
    )
    assert bool(quantize_values(poisoned, spec, seed=1)[0][inside].isnan().all())
    if not spec.hadamard:
        assert_values_equal(decoded[~inside], reference.dequantize()[~inside])
    assert not bool(clean.dequantize().isnan().any())


@each_spec
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zero_stays_zero(spec: QuantSpec, value: float) -> None:
    q = quantize(torch.full((32, 64), value), spec)
    assert bool((q.dequantize() == 0).all())
    assert int(q.block_scale.unique()) == BLOCK_FORMATS[spec.format].zero_block_scale


@each_spec
@pytest.mark.parametrize("magnitude", [2e-38, 2e38])
def test_magnitudes_at_both_ends_keep_their_size(spec: QuantSpec, magnitude: float) -> None:
    x = torch.full((32, 128), magnitude)
    decoded = quantize(x, QuantSpec(**{**vars(spec), "hadamard": 0})).dequantize().double()
    allowed = 0.13 if spec.rounding == "nearest" else 0.26
    assert bool(((decoded - x.double()).abs() <= allowed * magnitude).all())


@each_spec
@pytest.mark.parametrize("magnitude", [1e-38, 1e-41, 1e-45])
def test_magnitudes_below_the_range_shrink(spec: QuantSpec, magnitude: float) -> None:
    """NVFP4's factor 1 / (scale * tensor scale) is clamped to the largest FP32, so blocks below 1.8e-38 lose size."""
    x = torch.full((32, 128), magnitude)
    decoded = quantize(x, QuantSpec(**{**vars(spec), "hadamard": 0})).dequantize().double()
    smallest = 2.0**-127 if spec.format in ("mxfp8", "fp8_block", "s2f6") else 0.0
    assert bool((decoded >= 0).all()) and bool((decoded <= 1.26 * magnitude + smallest * 2.0**-6).all())


@each_spec
def test_a_single_outlier_is_kept_and_leaves_other_blocks(spec: QuantSpec) -> None:
    x = normal(256, 256) * 1e-3
    x[9, 9] = 30.0
    decoded = quantize(x, spec).dequantize()
    assert abs(float(decoded[9, 9]) - 30.0) <= 30.0 * 0.26
    if not spec.hadamard and spec.format != "nvfp4":
        assert sqnr_db(decoded[128:, 128:], x[128:, 128:]) > 15.0


@each_spec
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    q = quantize(torch.empty(shape), spec)
    assert q.dequantize().shape == shape
    assert quantize_values(torch.empty(shape), spec)[0].numel() == 0


@each_spec
def test_layout_of_memory_does_not_matter(spec: QuantSpec) -> None:
    x = normal(40, 96)
    strided = x.T.contiguous().T
    wide = torch.zeros(40, 200)
    wide[:, 3:195:2] = x
    for dim in (0, 1):
        q = quantize(x, spec, dim=dim, seed=11)
        assert_same(quantize(strided, spec, dim=dim, seed=11), q)
        assert_same(quantize(wide[:, 3:195:2], spec, dim=dim, seed=11), q)


@each_spec
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_quantize_as_their_fp32_values(spec: QuantSpec, dtype: torch.dtype) -> None:
    x = normal(20, 64, dtype=dtype)
    assert_same(quantize(x, spec, seed=5), quantize(x.float(), spec, seed=5))


@each_stochastic
def test_random_bits_belong_to_the_element(spec: QuantSpec) -> None:
    x = normal(64, 96)
    q = quantize(x, spec, seed=21)
    assert_same(quantize(x, spec, seed=torch.tensor(21)), q)
    assert_same(quantize(x, spec, seed=21 + 2**64), q)
    assert not torch.equal(quantize(x, spec, seed=22).codes, q.codes)
    assert not torch.equal(quantize(x, spec, seed=21 + 2**32).codes, q.codes)
    if not spec.tensor_scale == "tensor" and (spec.block or (1, 1))[0] == 1:
        # The first rows of a longer tensor have the same indices.
        assert_codes_equal(quantize(x[:10], spec, seed=21).codes, q.codes[:10])


def test_the_index_is_that_of_the_given_tensor() -> None:
    """One step above a half: which element rounds up shows whose bits it took, whichever dim is quantized."""
    spec = QuantSpec("mxfp8", rounding="stochastic")
    x = torch.full((32, 32), 17.0)
    x[0, :] = x[:, 0] = 448.0
    rows, columns = (quantize(x, spec, dim=dim, seed=4).dequantize() for dim in (1, 0))
    assert_values_equal(rows, columns)
    assert len(rows[1:, 1:].unique()) == 2


def test_expert_weights_have_their_own_scales() -> None:
    weights = normal(3, 24, 40) * torch.tensor([1.0, 8.0, 0.1]).view(3, 1, 1)
    for name in ("nvfp4", "nvfp4-2d", "nvfp4-rht", "mxfp8-2d", "nvfp4-4over6"):
        for dim in (1, 2):
            stacked = quantize(weights, SPECS[name], dim=dim)
            apart = [quantize(w, SPECS[name], dim=dim - 1) for w in weights]
            assert_codes_equal(stacked.codes, torch.stack([q.codes for q in apart]))
            assert_scales_equal(stacked.block_scale, torch.stack([q.block_scale for q in apart]))
            if stacked.tensor_scale is not None:
                assert stacked.tensor_scale.shape == (3, 1, 1)
            assert_values_equal(stacked.dequantize(), torch.stack([q.dequantize() for q in apart]))

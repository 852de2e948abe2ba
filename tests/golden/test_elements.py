"""Element casts and decoding against NVIDIA's host headers, the transform against scipy, Philox against TE's."""

from __future__ import annotations

import pytest
import torch

from lightning_nvfp4.formats import E2M1, E4M3, E5M2, E8M0, ElementFormat
from lightning_nvfp4.ops.reference.elements import decode_float, encode_float, power_of_two, round_float
from lightning_nvfp4.ops.reference.hadamard import inverse, transform
from lightning_nvfp4.ops.reference.philox import philox
from lightning_nvfp4.ops.reference.scales import exponent_ceil_rounded, magnitude_bits
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_values_equal

FLOATS = {"e2m1": (E2M1, "nv_host"), "e4m3": (E4M3, "nv_satfinite"), "e5m2": (E5M2, "nv_satfinite")}
GROUPS = ("bf16_all", "f32_rand", "f32_edge_e2m1", "f32_edge_e4m3", "f32_edge_e5m2", "f32_edge_e8m0")


def inputs(t: dict[str, torch.Tensor], group: str) -> torch.Tensor:
    if group != "bf16_all":
        return t[f"{group}.x"]
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("group", GROUPS)
def test_round_to_nearest_saturating(golden, group: str, name: str) -> None:
    t, (element, source) = golden("element_casts"), FLOATS[name]
    x = inputs(t, group)
    number = ~x.isnan()
    codes = encode_float(round_float(x, element), element)
    assert_codes_equal(codes, t[f"{group}.{name}.{source}"] & ((1 << element.bits) - 1), where=number)


@pytest.mark.parametrize("group", GROUPS[1:])
def test_e8m0_rounds_up(golden, group: str) -> None:
    t = golden("element_casts")
    x = t[f"{group}.x"]
    usable = (x >= 0) & x.isfinite()
    codes = exponent_ceil_rounded(magnitude_bits(x), 1.0)
    assert_codes_equal(codes, t[f"{group}.e8m0.nv_rp_satfinite"], where=usable)


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_every_code_decodes_to_its_value(golden, element: ElementFormat) -> None:
    expected = golden("element_casts")[f"decode.{element.name}.nv_host"]
    assert_values_equal(torch.tensor(element.values), expected, "value table")
    if element is E5M2:  # its codes of infinity are never written, and read as NaN
        expected = expected.masked_fill(expected.isinf(), float("nan"))
    assert_values_equal(decode_float(torch.arange(1 << element.bits), element), expected)


def test_every_scale_code_decodes_to_its_value(golden) -> None:
    expected = golden("element_casts")["decode.e8m0.nv_host"]
    assert_values_equal(power_of_two(torch.arange(256, dtype=torch.int32)), expected)
    assert_values_equal(torch.tensor(E8M0.values), expected, "value table")


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_transform_matches_scipy(golden, n: int) -> None:
    t = golden("hadamard")
    spec = QuantSpec(hadamard=n, hadamard_signs=(1,))  # pyright: ignore[reportArgumentType]
    y, exact = transform(t[f"h{n}.x"], spec), t[f"h{n}.y_f64"]
    # One rounding to BF16, after FP32 sums.
    assert bool(((y - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all())
    assert_values_equal(y, y.to(torch.bfloat16).float())


def test_transform_with_signs_is_exactly_rounded(golden) -> None:
    t, spec = golden("hadamard"), QuantSpec(hadamard=16)
    assert_values_equal(transform(t["rht16.x"].float(), spec).to(torch.bfloat16), t["rht16.y_bf16"])
    assert_values_equal(inverse(t["rht16.y_f64"], spec), t["rht16.x_back_f64"])


def test_philox_words(golden) -> None:
    t = golden("stochastic_rounding")
    mask = 0xFFFFFFFF
    for (seed, subsequence, offset), expected in zip(
        t["philox.seed_subsequence_offset"].tolist(), t["philox.u32"], strict=True
    ):
        draw = offset + torch.arange(8)
        halves = [torch.full_like(draw, subsequence >> shift & mask) for shift in (0, 32)]
        key = (torch.tensor(seed & mask), torch.tensor(seed >> 32 & mask))
        words = philox(key, (draw & mask, draw >> 32 & mask, halves[0], halves[1]))
        assert_codes_equal(torch.stack(words, dim=-1).flatten(), expected)

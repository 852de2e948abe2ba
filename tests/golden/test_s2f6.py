"""S2F6 elements and blocks against exact arithmetic on the published definition, code for code."""

from __future__ import annotations

import pytest
import torch

from lightning_nvfp4.formats import S2F6
from lightning_nvfp4.ops import quantize
from lightning_nvfp4.ops.reference.elements import power_of_two, round_fixed
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_scales_equal, assert_values_equal

PLAIN = QuantSpec("s2f6", hadamard=0)


def test_every_code_decodes_to_its_value(golden) -> None:
    assert_values_equal(torch.tensor(S2F6.values), golden("s2f6_mxint8")["elem.decode"])


def test_elements_round_to_even_and_clamp_symmetrically(golden) -> None:
    t = golden("s2f6_mxint8")
    x, expected = t["elem.x"], t["elem.s2f6_sym"]
    number = ~x.isnan()
    codes = round_fixed(x[number] * 64.0, S2F6.max_code).to(torch.int8)
    assert_codes_equal(codes, expected[number])


def test_elements_are_divided_by_their_scale(golden) -> None:
    t = golden("s2f6_mxint8")
    number = (t["scaled.scale"] < 255) & (t["scaled.scale"] > 0)
    x, scale = t["scaled.x"][number], power_of_two(t["scaled.scale"][number].int())
    codes = round_fixed(torch.div(x.double(), scale.double()).float() * 64.0, S2F6.max_code).to(torch.int8)
    assert_codes_equal(codes, t["scaled.s2f6_sym"][number])


@pytest.mark.parametrize("case", ["mxint8_bf16", "mxint8_fp32", "mxint8_boundary", "rht_s2f6.block"])
@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_blocks(golden, case: str, rule: str) -> None:
    t = golden("s2f6_mxint8")
    q = quantize(t[f"{case}.x"], QuantSpec("s2f6", hadamard=0, scale_rule=rule))  # pyright: ignore[reportArgumentType]
    codes, scales = ("rceil_codes", "rceil_scale") if rule == "ceil" else ("floor_codes_sym", "floor_scale")
    assert_codes_equal(q.codes, t[f"{case}.{codes}"])
    assert_scales_equal(q.block_scale, t[f"{case}.{scales}"])


def test_transform_then_blocks(golden) -> None:
    t = golden("s2f6_mxint8")
    q = quantize(t["rht_s2f6.x_bf16"], QuantSpec("s2f6", hadamard=16))
    assert_codes_equal(q.codes, t["rht_s2f6.block.rceil_codes"])
    assert_scales_equal(q.block_scale, t["rht_s2f6.block.rceil_scale"])

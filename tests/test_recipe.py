"""Presets, overrides and their errors."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.recipe import OPERANDS, PRESETS, GemmRecipe, QuantSpec, load_recipe


def test_hybrid_is_nvfp4_forward_and_stochastic_mxfp8_backward():
    gemm = PRESETS["nvfp4-hybrid"].gemms["experts"]
    assert gemm.fprop_input == QuantSpec("nvfp4", tensor_scale="row")
    assert gemm.fprop_weight == QuantSpec("nvfp4")
    assert gemm.dgrad_grad_output == gemm.wgrad_grad_output == QuantSpec("mxfp8", rounding="stochastic")
    assert gemm.dgrad_weight == gemm.wgrad_input == QuantSpec("mxfp8")
    assert gemm.source == "dequantized"


def test_control_arm_quantizes_nothing():
    for gemm in PRESETS["bf16-gemm"].gemms.values():
        assert all(getattr(gemm, name) is None for name in OPERANDS)


def test_an_override_changes_one_field_and_no_other():
    changed = load_recipe("nvfp4-hybrid", {"gemms": {"experts": {"fprop_input": {"tensor_scale": "tensor"}}}})
    expected = dataclasses.replace(
        PRESETS["nvfp4-hybrid"].gemms["experts"], fprop_input=QuantSpec("nvfp4", tensor_scale="tensor")
    )
    assert changed.gemms["experts"] == expected
    assert changed.gemms["mlp"] == PRESETS["nvfp4-hybrid"].gemms["mlp"]


def test_an_override_may_be_an_omegaconf_container():
    overrides = OmegaConf.create({"n": 3, "keep_last_blocks": "${n}"})
    del overrides["n"]
    overrides = OmegaConf.create({"keep_last_blocks": 3})
    assert load_recipe("mxfp8", overrides).keep_last_blocks == 3


def test_null_operand_is_bf16_and_another_format_starts_from_its_defaults():
    changed = load_recipe("mxfp8", {"gemms": {"linear": {"wgrad_input": None, "fprop_input": {"format": "nvfp4"}}}})
    assert changed.gemms["linear"].wgrad_input is None
    assert changed.gemms["linear"].fprop_input == QuantSpec("nvfp4")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"keep_lst_blocks": 1}, ["keep_lst_blocks", "keep_last_blocks"]),
        ({"keep_last_blocks": -1}, ["keep_last_blocks", "-1"]),
        ({"gemms": {"experts": {"fprop_inputs": None}}}, ["overrides.gemms.experts", "fprop_input"]),
        ({"gemms": {"experts": {"fprop_input": {"tensor_scal": "row"}}}}, ["tensor_scal", "tensor_scale"]),
        ({"gemms": {"experts": {"fprop_input": {"tensor_scale": "rows"}}}}, ["'rows'", "tensor, row"]),
        ({"gemms": {"experts": {"wgrad_input": {"format": "nvfp4", "hadamard": 16}}}}, ["hadamard", "wgrad"]),
        ({"gemms": {"experts": {"source": "dequantised"}}}, ["dequantised", "dequantized"]),
        ({"roles": {"expert": "keep"}}, ["'expert'", "'experts'"]),
        ({"roles": {"experts": "nope"}}, ["'nope'", "keep"]),
        ({"rules": [{"match": "*"}]}, ["rules[0]", "use"]),
        ({"rules": [{"match": "*", "uses": "keep"}]}, ["uses", "'use'"]),
        ({"rules": {"match": "*"}}, ["rules", "list"]),
        ({"gemms": [1]}, ["gemms", "mapping"]),
        ([1], ["overrides", "mapping"]),
    ],
)
def test_a_wrong_override_names_the_field_and_the_cure(overrides, words):
    with pytest.raises(UserError) as error:
        load_recipe("nvfp4-hybrid", overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(UserError, match="'nvfp4-hybrid'"):
        load_recipe("nvfp4hybrid")


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "nvfp8"},
        {"format": "mxfp8", "element": "e2m1"},
        {"format": "nvfp4", "block": (1, 32)},
        {"format": "mxfp8", "tensor_scale": "row"},
        {"format": "nvfp4", "hadamard": 8},
        {"format": "nvfp4", "rounding": "up"},
        {"format": "nvfp4", "four_over_six": "mae", "rounding": "stochastic"},
        {"format": "mxfp8", "four_over_six": "mae"},
        {"format": "nvfp4", "hadamard": 16, "hadamard_signs": (1, 2)},
        {"format": "nvfp4", "hadamard_signs": (1, -1)},
        {"format": "nvfp4", "sr_bits": 16},
    ],
)
def test_a_quant_spec_refuses_what_its_format_does_not_have(fields):
    with pytest.raises(UserError):
        QuantSpec(**fields)


def test_names_for_tables():
    gemm = PRESETS["nvfp4-hybrid"].gemms["experts"]
    assert (gemm.forward_name(), gemm.backward_name()) == ("nvfp4", "mxfp8+SR x mxfp8")
    assert GemmRecipe().forward_name() == "bf16"

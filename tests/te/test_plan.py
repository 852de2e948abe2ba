"""Which TE quantizers a recipe is, on any machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lightning_nvfp4 import PRESETS, GemmRecipe, QuantSpec, load_recipe
from lightning_nvfp4.ops import quantize
from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.ops.te.main_grad import stand_ins
from lightning_nvfp4.ops.te.plan import ROWS, TENSORS, builtin, planned, quantizers, uncovered
from lightning_nvfp4.recipe import OPERANDS

HYBRID = PRESETS["nvfp4-hybrid"].gemms["experts"]
QUANTIZED = [name for name in PRESETS if name != "bf16-gemm"]


@pytest.mark.parametrize("preset", QUANTIZED)
@pytest.mark.parametrize("role", ["experts", "mlp", "linear"])
def test_every_preset_can_be_planned_and_printed(preset: str, role: str) -> None:
    gemm = PRESETS[preset].gemms[role]
    assert uncovered(gemm) is None
    assert {tensor: plan.text() for tensor, plan in planned(gemm).items()}.keys() == TENSORS.keys()


def test_the_built_in_recipes_are_those_of_the_presets() -> None:
    assert {name: builtin(PRESETS[name].gemms["experts"]) for name in QUANTIZED} == {
        "nvfp4-hybrid": None,
        "nvfp4": "NVFP4BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "fp8": "Float8BlockScaling",
    }


@pytest.mark.parametrize("preset", QUANTIZED)
@pytest.mark.parametrize("role", ["experts", "linear"])
def test_planes_have_the_formats_of_the_operands(preset: str, role: str) -> None:
    gemm = PRESETS[preset].gemms[role]
    for tensor, plan in quantizers(gemm).items():
        parts = plan.parts or (plan, plan)
        for part, name in zip(parts, TENSORS[tensor], strict=True):
            assert part.spec == getattr(gemm, name)
    assert {name for names in TENSORS.values() for name in names} == set(OPERANDS)


def test_the_hybrid() -> None:
    plans = quantizers(HYBRID)
    for tensor, row_scaled in (("input", True), ("weight", False)):
        plan = plans[tensor]
        assert plan.kind == "HybridQuantizer" and plan.fields == {"columnwise_source": "rowwise_dequantized"}
        assert plan.parts is not None
        row, column = plan.parts
        assert (row.kind, row.fields["row_scaled_nvfp4"], row.fields["with_rht"]) == (
            "NVFP4Quantizer",
            row_scaled,
            False,
        )
        assert (column.kind, column.fields["fp8_dtype"]) == ("MXFP8Quantizer", "kFloat8E4M3")
    gradient = plans["grad_output"]
    assert gradient.parts is not None and gradient.fields == {"columnwise_source": "original"}
    assert [part.kind for part in gradient.parts] == ["StochasticMXFP8Quantizer"] * 2


def test_the_hybrid_of_one_scale_a_tensor_is_not_row_scaled() -> None:
    """TE multiplies row-scaled experts one by one; this variant it does not."""
    recipe = load_recipe("nvfp4-hybrid", {"gemms": {"experts": {"fprop_input": {"tensor_scale": "tensor"}}}})
    parts = quantizers(recipe.gemms["experts"])["input"].parts
    assert parts is not None and parts[0].fields["row_scaled_nvfp4"] is False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fprop_input": QuantSpec("s2f6"), "fprop_weight": QuantSpec("s2f6")}, "fprop_input: it has no s2f6 GEMM"),
        ({"fprop_input": QuantSpec("mxfp8")}, "operands of one format"),
        ({"dgrad_weight": QuantSpec("mxfp8", scale_rule="floor")}, "ceil rule"),
        ({"dgrad_weight": QuantSpec("mxfp8", rounding="stochastic")}, "that of gradients"),
        (
            {"wgrad_grad_output": QuantSpec(hadamard=32), "wgrad_input": QuantSpec(hadamard=32)},
            "Hadamard transform has length 16",
        ),
        ({"wgrad_input": QuantSpec(tensor_scale="row"), "wgrad_grad_output": QuantSpec()}, "row-scaled NVFP4 is for"),
    ],
)
def test_what_te_lacks_is_named(changes: dict[str, QuantSpec], words: str) -> None:
    assert words in str(uncovered(dataclasses.replace(HYBRID, **changes)))


@pytest.mark.parametrize(
    ("preset", "shape", "fits"),
    [("fp8", (48, 80), True), ("fp8", (48, 72), False), ("mxfp8", (96, 64), True), ("mxfp8", (4, 96, 80), False)],
)
def test_sizes_of_weights(preset: str, shape: tuple[int, ...], fits: bool) -> None:
    assert (uncovered(PRESETS[preset].gemms["linear"], shape) is None) == fits


def test_a_forward_in_bf16_keeps_its_backward() -> None:
    gemm = dataclasses.replace(HYBRID, fprop_input=None, fprop_weight=None)
    assert uncovered(gemm) is None
    plan = quantizers(gemm)["input"]
    assert plan.parts is not None and plan.fields == {"columnwise_source": "original"}
    assert [part.kind for part in plan.parts] == ["IdentityQuantizer", "MXFP8Quantizer"]
    assert quantizers(GemmRecipe())["weight"].kind == "IdentityQuantizer"


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_gradient_are_rows_of_the_whole(dim: int) -> None:
    """Stochastic rounding draws by the index in the whole gradient, in whatever parts it is asked for."""
    spec, seed = QuantSpec("mxfp8", rounding="stochastic"), 11
    dy = torch.randn(3 * ROWS, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = quantize(dy, spec, dim=dim, seed=seed)
    codes, scales = (q.codes, q.block_scale) if dim else (q.codes.t(), q.block_scale.t())
    gradient = Gradient()
    gradient.begin(dy, seed)
    found = [gradient.quantized(part, spec, dim) for part in torch.split(dy, (ROWS, 0, 2 * ROWS))]
    assert torch.equal(torch.cat([part for part, _ in found]), codes)
    assert torch.equal(torch.cat([part for _, part in found]), scales)
    other = dy.clone()
    assert torch.equal(gradient.quantized(other[:ROWS], spec, dim)[0], codes[:ROWS])
    assert not torch.equal(gradient.quantized(other[ROWS:], spec, dim)[0], codes[ROWS:]), "another tensor starts at 0"


class _WritesMainGrad(torch.autograd.Function):
    """What a GEMM that accumulates into `main_grad` does with its weights."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.ask = [weight.get_main_grad for weight in weights]
        assert all(weight.overwrite_main_grad for weight in weights)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        for number, ask in enumerate(ctx.ask, start=1):
            ask().fill_(number)
        return dy, *[None] * len(ctx.ask)


@pytest.mark.parametrize("experts", [1, 3])
def test_what_is_written_into_main_grad_is_the_gradient(experts: int) -> None:
    w = torch.nn.Parameter(torch.randn(experts, 4, 5))
    for times in (1, 2):
        weights = stand_ins(w)
        assert all(torch.equal(a, b) for a, b in zip(weights, w, strict=True))
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(weights, w, strict=True)), "no copies"
        _WritesMainGrad.apply(torch.ones(2, requires_grad=True), *weights).sum().backward()
        assert w.grad is not None
        expected = torch.arange(1.0, experts + 1).view(-1, 1, 1).expand_as(w)
        assert torch.equal(w.grad, times * expected)


def test_gradients_returned_in_the_place_of_main_grad_are_an_error() -> None:
    w = torch.nn.Parameter(torch.randn(1, 4, 5))
    with pytest.raises(RuntimeError, match="main_grad"):
        stand_ins(w)[0].sum().backward()


@pytest.mark.parametrize("preset", QUANTIZED)
@pytest.mark.parametrize("role", ["experts", "linear"])
def test_the_documentation_lists_every_quantizer_with_its_fields(root: Path, preset: str, role: str) -> None:
    text = (root / "docs" / "numerics.md").read_text()
    for plan in planned(PRESETS[preset].gemms[role]).values():
        for part in plan.parts or (plan,):
            fields = {name: value for name, value in part.fields.items() if name not in ("rowwise", "columnwise")}
            common = text[text.index(f"`{part.kind}(") :].split("`")[1]
            rest = ", ".join(f"{name}={value}" for name, value in fields.items() if f"{name}=" not in common)
            assert all(f"{name}={value}" in common for name, value in fields.items() if f"{name}=" in common) or (
                dataclasses.replace(part, fields=fields).text() in text
            )
            assert rest in text

"""The Triton kernels against the reference, bit for bit: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from contract.formats import ALL, normal

from lightning_nvfp4 import QuantSpec
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops import (
    Groups,
    QuantizedTensor,
    quantize,
    quantize_values,
    quantize_values_twice,
    quantize_with_values,
    requantize_values,
    rows_matmul,
    tokens_matmul,
)
from lightning_nvfp4.ops.backends import backend_for
from lightning_nvfp4.testing import assert_codes_equal, assert_values_equal

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    # The interpreter computes with NumPy, which warns of what IEEE arithmetic defines.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Whole tiles of the GPU's kernels, and more than one of the interpreter's, which takes a second for a few.
WHOLE = (64, 128) if DEVICE == "cuda" else (32, 64)
COVERED = {name: spec for name, spec in ALL.items() if not spec.four_over_six}
each_spec = pytest.mark.parametrize("spec", COVERED.values(), ids=COVERED)


def adversarial(*shape: int) -> torch.Tensor:
    """Return numbers over a wide range, with zeros of both signs, ties, subnormal and non-finite ones."""
    x = normal(*shape) * normal(*shape, seed=1).mul(3).exp2()
    flat = x.view(-1)
    flat[0::29], flat[1::31] = 0.0, -0.0
    flat[2::37] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 448.0]).repeat(len(flat))[: len(flat[2::37])]
    if len(flat) > 300:
        flat[111], flat[191], flat[271] = float("inf"), float("nan"), -float("inf")
        flat[64:96] *= 2.0**-140
        flat[128:160] *= 2.0**110
    return x


def assert_same(ours: QuantizedTensor, reference: QuantizedTensor) -> None:
    assert_codes_equal(ours.codes.cpu(), reference.codes)
    assert_codes_equal(ours.block_scale.cpu(), reference.block_scale)
    for a, b in ((ours.tensor_scale, reference.tensor_scale), (ours.amax, reference.amax)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape
            assert_values_equal(a.cpu(), b)


@each_spec
@pytest.mark.parametrize("shape", [(37, 50), (2, 9, 40), WHOLE, (5,), (2, 1, 3, 16), (1, 1)], ids=str)
def test_codes_and_scales_are_the_references(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    # Where one scale serves the tensor, the extremes of the second leave only zeros and saturated codes of the rest.
    for x in (normal(*shape), adversarial(*shape)):
        for dim in range(len(shape)):
            reference = quantize(x, spec, dim=dim, seed=7, backend="reference")
            assert_same(quantize(x.to(DEVICE), spec, dim=dim, seed=7, backend="triton"), reference)


@each_spec
@pytest.mark.parametrize("shape", [(37, 50), (3, 20, 40), (64, 36)], ids=str)
def test_values_and_decoding_are_the_references(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    x.view(-1)[77] = float("nan")
    for dim in range(len(shape)):
        q = quantize(x, spec, dim=dim, seed=7, backend="reference")
        values, _ = quantize_values(x.to(DEVICE), spec, dim=dim, seed=7, backend="triton")
        assert_values_equal(values.cpu(), q.operand())
        kernels = backend_for(x.to(DEVICE), spec, "triton")
        codes, block_scale, tensor_scale, _ = (None if t is None else t.to(DEVICE) for t in q.tensors())
        assert codes is not None and block_scale is not None
        for scale, inverse in ((None, False), (tensor_scale, True)):
            decoded = kernels.decode(codes, block_scale, scale, spec, q.shape, dim, torch.float32, inverse)
            assert_values_equal(decoded.cpu(), q.dequantize() if inverse else q.operand())


@pytest.mark.parametrize(
    ("name", "shape"), [("nvfp4", (64, 512)), ("mxfp8", (128, 512)), ("nvfp4-rht-sr", (16, 512))], ids=str
)
def test_tiles_without_masks_down_columns(name: str, shape: tuple[int, int]) -> None:
    x, spec = normal(*shape), COVERED[name]
    reference = quantize(x, spec, dim=0, seed=7, backend="reference")
    assert_same(quantize(x.to(DEVICE), spec, dim=0, seed=7, backend="triton"), reference)
    values, _ = quantize_values(x.to(DEVICE), spec, dim=0, seed=7, backend="triton")
    assert_values_equal(values.cpu(), reference.operand())


@each_spec
@pytest.mark.parametrize("shape", [(32, 1), (2, 64, 1)], ids=str)
def test_a_single_column(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    for x in (normal(*shape), adversarial(*shape)):
        reference = quantize(x, spec, dim=-2, seed=7, backend="reference")
        assert_same(quantize(x.to(DEVICE), spec, dim=-2, seed=7, backend="triton"), reference)


@each_spec
@pytest.mark.parametrize("shape", [(64, 32), (2, 32, 16)], ids=str)
def test_transposed_input(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    x = normal(*shape).transpose(-1, -2)
    ours, values = quantize_with_values(x.to(DEVICE), spec, dim=-1, seed=7, backend="triton")
    reference = quantize(x, spec, dim=-1, seed=7, backend="reference")
    assert_same(ours, reference)
    assert_values_equal(values.cpu(), reference.operand())


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-row", "mxfp8"])
@pytest.mark.parametrize("dim", [0, 1], ids=["permuted", "expanded"])
def test_batches_of_other_strides_down_columns(name: str, dim: int) -> None:
    x = normal(3, 32, 20).transpose(0, 1) if dim == 0 else normal(1, 32, 20).expand(3, 32, 20)
    ours, values = quantize_with_values(x.to(DEVICE), COVERED[name], dim=dim, seed=7, backend="triton")
    reference = quantize(x, COVERED[name], dim=dim, seed=7, backend="reference")
    assert_same(ours, reference)
    assert_values_equal(values.cpu(), reference.operand())


def test_codes_of_any_strides_are_decoded() -> None:
    q = quantize(normal(32, 64).to(DEVICE), QuantSpec("mxfp8"))
    strided = QuantizedTensor(q.codes.T.contiguous().T, q.block_scale.T.contiguous().T, None, None, q.spec, q.shape, 1)
    kernels = backend_for(q.codes, q.spec, "triton")
    decoded = kernels.decode(strided.codes, strided.block_scale, None, q.spec, q.shape, 1, torch.float32, False)
    assert_values_equal(decoded.cpu(), q.dequantize().cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["nvfp4-row", "mxfp8-sr", "s2f6"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    x = normal(33, 64).to(dtype)
    assert_same(
        quantize(x.to(DEVICE), ALL[name], seed=1, backend="triton"), quantize(x, ALL[name], seed=1, backend="reference")
    )


@pytest.mark.parametrize("name", [name for name in COVERED if name.startswith(("nvfp4", "mxfp8"))])
@pytest.mark.parametrize("shape", [WHOLE, (32, 38), (2, 32, 32)], ids=str)
def test_whole_blocks_of_bf16(name: str, shape: tuple[int, ...]) -> None:
    inputs = (normal(*shape).bfloat16(), adversarial(*shape).bfloat16())
    for x in inputs if DEVICE == "cuda" or shape == WHOLE else inputs[1:]:
        for dim in (-1, -2):
            reference = quantize(x, COVERED[name], dim=dim, seed=7, backend="reference")
            assert_same(quantize(x.to(DEVICE), COVERED[name], dim=dim, seed=7, backend="triton"), reference)
            values, _ = quantize_values(x.to(DEVICE), COVERED[name], dim=dim, seed=7, backend="triton")
            assert_values_equal(values.cpu(), reference.operand())


def test_an_explicit_amax_of_each_shape() -> None:
    x, spec = normal(6, 64), QuantSpec()
    for amax in (torch.tensor(9.0), torch.rand(6, 1) + 4, torch.rand(1, 4) + 4, torch.rand(6, 4) + 4):
        ours = quantize(x.to(DEVICE), spec, amax=amax.to(DEVICE), backend="triton")
        assert_same(ours, quantize(x, spec, amax=amax, backend="reference"))


def test_a_row_longer_than_one_program_holds() -> None:
    x, spec = normal(2, 20000), QuantSpec(tensor_scale="row")
    assert_same(quantize(x.to(DEVICE), spec, backend="triton"), quantize(x, spec, backend="reference"))


@pytest.mark.parametrize("name", [n for n in COVERED if n.startswith("mxfp8")])
@pytest.mark.parametrize("shape", [(37, 50), (64, 128)], ids=str)
def test_both_directions_in_one_pass_are_two_quantizations(name: str, shape: tuple[int, int]) -> None:
    x, spec = adversarial(*shape), COVERED[name]
    ours = quantize_values_twice(x.to(DEVICE), spec, spec, seed=5, backend="triton")
    for values, dim in zip(ours, (1, 0), strict=True):
        assert_values_equal(values.cpu(), quantize_values(x, spec, dim=dim, seed=5, backend="reference")[0])


@pytest.mark.parametrize(
    ("source", "name"),
    [(source, "mxfp8") for source in ("nvfp4", "nvfp4-row", "nvfp4-2d")]
    + [("nvfp4-row", name) for name in ("mxfp8-sr", "mxfp8-2d", "fp8")],
)
@pytest.mark.parametrize(
    ("shape", "between"),
    [((37, 50), torch.float32), ((32, 256), torch.bfloat16), ((2, 20, 40), torch.bfloat16)],
    ids=str,
)
def test_requantization_is_decoding_and_quantizing(
    source: str, name: str, shape: tuple[int, ...], between: torch.dtype
) -> None:
    q = quantize(normal(*shape), COVERED[source])
    dim = len(shape) - 2
    expected, _ = quantize_values(q.dequantize(between), COVERED[name], dim=dim, seed=9, backend="reference")
    parts = [None if t is None else t.to(DEVICE) for t in q.tensors()]
    moved = QuantizedTensor.from_tensors(q.meta, parts)
    ours, _ = requantize_values(moved, COVERED[name], dim=dim, seed=9, backend="triton", source=between)
    assert_values_equal(ours.cpu(), expected)


GROUPED = [((70,), 33, 50), ((32, 0, 64), 48, 40), ((0, 96, 32, 32), 130, 72)]


@pytest.mark.parametrize(("counts", "n", "k"), GROUPED, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_products_of_integers_are_exact(counts: tuple[int, ...], n: int, k: int, scaled: bool) -> None:
    """Sums of small integers do not depend on their order, so that every bit can be compared."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    groups, rows, experts = Groups.of(counts), sum(counts), len(counts)
    x, w, y = integers(rows, k), integers(experts, n, k), integers(rows, n)
    scales = {"row_scale": torch.rand(rows, 1), "column_scale": torch.rand(experts, 1)} if scaled else {}
    bias = torch.randn(experts, n) if scaled else None

    def both(function, *operands, **arguments):
        expected = function(*operands, groups, backend="reference", **arguments)
        moved = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
        ours = function(*(t.to(DEVICE, torch.bfloat16) for t in operands), groups, backend="triton", **moved)
        assert_values_equal(ours.cpu(), expected)

    both(rows_matmul, x, w, transposed=True, bias_EN=bias, **scales)
    both(rows_matmul, x, w.transpose(1, 2).contiguous(), transposed=False, **scales)
    per_expert = {"row_scale": torch.rand(experts, n), "column_scale": torch.rand(experts, 1)} if scaled else {}
    both(tokens_matmul, y, x, **per_expert)


def test_what_has_no_kernel_is_refused_by_name_and_runs_as_the_reference_under_auto() -> None:
    spec = QuantSpec(four_over_six="mae")
    with pytest.raises(UserError, match="four_over_six.*no kernel.*'auto'"):
        quantize(torch.ones(16, device=DEVICE), spec, backend="triton")
    assert quantize(torch.ones(16, device=DEVICE), spec).codes.numel() == 8

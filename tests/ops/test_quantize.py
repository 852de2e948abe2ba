"""What `quantize` promises about its arguments, its result and its surroundings."""

from __future__ import annotations

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats import E2M1, E4M3, E5M2
from lightning_nvfp4.formats.element import ElementFormat
from lightning_nvfp4.ops import (
    QuantizedTensor,
    hadamard_transform,
    quantize,
    quantize_values,
    quantize_values_twice,
)
from lightning_nvfp4.ops.reference.elements import round_float
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_unbiased, assert_values_equal


def test_layout_and_shapes() -> None:
    x = torch.randn(6, 40)
    q = quantize(x, QuantSpec())
    assert (q.codes.shape, q.codes.dtype) == ((6, 20), torch.uint8)
    assert (q.block_scale.shape, q.block_scale.dtype) == ((6, 3), torch.uint8)
    assert q.tensor_scale is not None and q.tensor_scale.shape == () and q.amax is not None
    assert q.amax == x.abs().max() and q.dim == 1 and q.shape == (6, 40)
    columns = quantize(x, QuantSpec(tensor_scale="row"), dim=0)
    assert columns.codes.shape == (40, 3) and columns.block_scale.shape == (40, 1)
    assert columns.tensor_scale is not None and columns.tensor_scale.shape == (40, 1)
    assert quantize(x, QuantSpec("s2f6")).codes.dtype == torch.int8
    assert quantize(x, QuantSpec("mxfp8")).tensor_scale is None
    assert q.nbytes == 6 * 20 + 6 * 3 + 4 + 4


def test_first_element_is_in_the_low_nibble() -> None:
    q = quantize(torch.tensor([6.0, -1.0, 0.5]), QuantSpec(), amax=torch.tensor(2688.0))
    assert q.codes.tolist() == [7 | 10 << 4, 1]


def test_square_blocks_repeat_their_scale_in_each_row() -> None:
    q = quantize(torch.randn(40, 64), QuantSpec(block=(16, 16)))
    assert q.block_scale.shape == (40, 4)
    for start in (0, 16, 32):
        assert len(q.block_scale[start : start + 16].unique(dim=0)) == 1


def test_a_row_scale_depends_on_its_row_only() -> None:
    x = torch.randn(8, 64)
    whole = quantize(x, QuantSpec(tensor_scale="row")).dequantize()
    assert_values_equal(torch.cat([quantize(r[None], QuantSpec(tensor_scale="row")).dequantize() for r in x]), whole)


def test_segments_with_their_own_tensor_scale() -> None:
    """An explicit amax for parts of the rows, or of the blocks, gives what each part gives alone."""
    x = torch.randn(12, 64) * torch.tensor([1.0] * 6 + [9.0] * 6).unsqueeze(1)
    parts = [quantize(part, QuantSpec()) for part in x.split(6)]
    amax = torch.stack([p.amax for p in parts if p.amax is not None]).repeat_interleave(6).unsqueeze(1)
    rows = quantize(x, QuantSpec(), amax=amax)
    assert_codes_equal(rows.codes, torch.cat([p.codes for p in parts]))
    assert_values_equal(rows.dequantize(), torch.cat([p.dequantize() for p in parts]))
    columns = quantize(x.T.contiguous(), QuantSpec(), dim=0, amax=amax)
    assert_values_equal(columns.dequantize(), rows.dequantize().T.contiguous())
    tokens = torch.randn(64, 10) * torch.tensor([1.0] * 32 + [5.0] * 32).unsqueeze(1)
    parts = [quantize(part, QuantSpec(), dim=0) for part in tokens.split(32)]
    amax = torch.stack([p.amax for p in parts if p.amax is not None]).repeat_interleave(2).unsqueeze(0)
    blocks = quantize(tokens, QuantSpec(), dim=0, amax=amax)
    assert blocks.tensor_scale is not None and blocks.tensor_scale.shape == (1, 4)
    assert_values_equal(blocks.dequantize(), torch.cat([p.dequantize() for p in parts]))


def test_an_explicit_amax_may_have_any_dtype() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    expected = quantize(x, QuantSpec(), amax=torch.tensor(4.0))
    for dtype in (torch.float64, torch.bfloat16):
        q = quantize(x, QuantSpec(), amax=torch.tensor(4.0, dtype=dtype))
        assert_codes_equal(q.codes, expected.codes)
        assert q.amax is not None and q.amax.dtype == torch.float32


def test_transform_ahead_equals_transform_inside() -> None:
    x = torch.randn(5, 50)
    spec = QuantSpec(hadamard=16, rounding="nearest")
    inside, ahead = quantize(x, spec), quantize(hadamard_transform(x, spec), QuantSpec())
    assert inside.length == 64
    assert_codes_equal(inside.codes, ahead.codes)


@pytest.mark.parametrize("n", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [16, 50, 128])
def test_the_inverse_transform_restores_the_tensor(n: int, length: int) -> None:
    x = torch.randn(7, length)
    spec = QuantSpec("s2f6", hadamard=n)  # pyright: ignore[reportArgumentType]
    for dim in (0, 1):
        error = (quantize(x, spec, dim=dim).dequantize() - x).norm() / x.norm()
        assert error < 0.02


def test_saved_tensors_come_back() -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            q = quantize(x, QuantSpec())
            ctx.save_for_backward(*q.tensors())
            ctx.meta = q.meta
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            return QuantizedTensor.from_tensors(ctx.meta, ctx.saved_tensors).dequantize()

    x = torch.randn(4, 32, requires_grad=True)
    Save.apply(x).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    assert x.grad is not None
    assert_values_equal(x.grad, quantize(x, QuantSpec()).dequantize())
    assert hash(quantize(x, QuantSpec()).meta) == hash(quantize(x, QuantSpec()).meta)
    with pytest.raises(ValueError, match="codes and block_scale"):
        QuantizedTensor.from_tensors(quantize(x, QuantSpec()).meta, [None, None, None, None])


def test_no_global_random_state_is_touched() -> None:
    state = torch.get_rng_state()
    quantize(torch.ones(8, 32), QuantSpec("mxfp8", rounding="stochastic"), seed=1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("spec", [QuantSpec("mxfp8"), QuantSpec(), QuantSpec("mxfp8", element="e5m2")], ids=str)
def test_stochastic_rounding_is_unbiased(spec: QuantSpec) -> None:
    """One value between two neighbours, in thousands of blocks that share a scale."""
    spec = QuantSpec(**{**vars(spec), "rounding": "stochastic"})
    element = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[spec.element or ""]
    draws, fractions = 1 << 14, torch.tensor([1 / 64, 0.125, 0.3, 0.5, 0.875, 63 / 64])
    assert spec.block is not None
    for row, fraction in enumerate(fractions):
        x = torch.zeros(draws, spec.block[1])
        x[:, 0] = element.max
        low, high = element.values[element.max_code - 2], element.values[element.max_code - 1]
        x[:, 1] = low + (high - low) * fraction
        amax = torch.tensor(element.max * E4M3.max) if spec.format == "nvfp4" else None
        q = quantize(x, spec, seed=100 + row, amax=amax)
        decoded = q.dequantize()[:, 1]
        assert sorted(decoded.unique().tolist()) == [low, high]
        exact = (x[0, 1] - low) / (high - low)
        assert_unbiased((decoded == high).sum().reshape(1), draws, exact.reshape(1))


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_nearest_is_nearest_over_a_dense_grid(element: ElementFormat) -> None:
    grid = torch.tensor([v for v in element.values if abs(v) <= element.max], dtype=torch.float64)
    x = torch.linspace(-1.05 * element.max, 1.05 * element.max, 20001)
    distance = (x.double().unsqueeze(1) - grid).abs().amin(1)
    assert bool(((round_float(x, element).double() - x.double()).abs() == distance).all())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(torch.tensor(1.0), QuantSpec()), "at least one dim"),
        (lambda: quantize(torch.ones(4, dtype=torch.int32), QuantSpec()), "floating-point"),
        (lambda: quantize(torch.ones(4), QuantSpec(), backend="triten"), "Did you mean 'triton'"),
        (lambda: quantize(torch.ones(4), QuantSpec(), backend="te"), "backend='te' cannot run"),
        (lambda: quantize(torch.ones(4), QuantSpec("mxfp8"), amax=torch.tensor(1.0)), "no tensor scale"),
        (lambda: quantize_values(torch.ones(4), QuantSpec("mxfp8"), amax=torch.tensor(1.0)), "no tensor scale"),
        (lambda: quantize(torch.ones(4, 32), QuantSpec(), amax=torch.ones(3, 1)), "broadcast"),
        (lambda: quantize(torch.eye(32).to_sparse(), QuantSpec()), "dense"),
        (lambda: quantize([1.0], QuantSpec()), "of type list"),  # pyright: ignore[reportArgumentType]
        (lambda: quantize(torch.ones(4), "nvfp4"), "QuantSpec"),  # pyright: ignore[reportArgumentType]
        (lambda: quantize(torch.ones(4), QuantSpec(), seed=1.5), "seed = 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: quantize(torch.ones(4), QuantSpec(), seed=torch.tensor([1, 2])), "shape"),
        (lambda: quantize(torch.ones(4), QuantSpec(), seed=torch.tensor(1.5)), "float32"),
    ],
)
def test_user_errors(call, words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()


VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "negated": lambda x: torch._neg_view(-x),
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "with a graph": lambda x: x.clone().requires_grad_() * 1,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_view_gives_the_bits_of_its_copy(view: str, dim: int) -> None:
    x = torch.randn(20, 40)
    for spec in (QuantSpec(), QuantSpec(hadamard=16), QuantSpec("mxfp8", rounding="stochastic")):
        q, expected = (quantize(t, spec, dim=dim, seed=3) for t in (VIEWS[view](x), x))
        assert_codes_equal(q.codes, expected.codes)
        assert_codes_equal(q.block_scale, expected.block_scale)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="vmap has no rule for views of another dtype before torch 2.13")
def test_mapped_over_a_dim() -> None:
    x = torch.randn(3, 5, 40)
    mapped = torch.vmap(lambda t: quantize(t, QuantSpec("mxfp8")).dequantize())(x)
    assert_values_equal(mapped, quantize(x, QuantSpec("mxfp8")).dequantize())


def test_twice_takes_matrices_and_formats_without_tensor_scale() -> None:
    mx = QuantSpec("mxfp8")
    with pytest.raises(UserError, match=r"shape \(33,\)"):
        quantize_values_twice(torch.ones(33), mx, mx)
    with pytest.raises(UserError, match="'nvfp4'"):
        quantize_values_twice(torch.ones(4, 4), QuantSpec(), mx)


def test_an_amax_that_is_no_tensor() -> None:
    with pytest.raises(UserError, match=r"amax = 3.0 .*torch.tensor"):
        quantize(torch.ones(4, 4), QuantSpec(), amax=3.0)  # pyright: ignore[reportArgumentType]


def test_a_dim_that_does_not_exist() -> None:
    with pytest.raises(IndexError, match="dim = 2"):
        quantize(torch.ones(4, 4), QuantSpec(), dim=2)


def test_fullgraph_compilation_traces_the_definition() -> None:
    """Traced without running a compiler: the graph has no break and gives the same bits."""
    x = torch.randn(8, 64)

    def decode(x: torch.Tensor) -> torch.Tensor:
        return quantize(x, QuantSpec("mxfp8", rounding="stochastic"), seed=3).dequantize()

    compiled = torch.compile(decode, backend="eager", fullgraph=True)
    assert_values_equal(compiled(x), decode(x))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gpu_gives_the_same_bits(rounding: str) -> None:
    for name in ("nvfp4", "mxfp8", "s2f6", "fp8_block"):
        spec = QuantSpec(name, rounding=rounding)  # pyright: ignore[reportArgumentType]
        x = torch.randn(100, 130)
        q, on_gpu = quantize(x, spec, seed=2), quantize(x.cuda(), spec, seed=2)
        assert_codes_equal(on_gpu.codes.cpu(), q.codes)
        assert_codes_equal(on_gpu.block_scale.cpu(), q.block_scale)

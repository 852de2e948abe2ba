"""The emulated GEMM: exact operands, FP32 sums, tensor scales in the epilogue."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats import E2M1, E4M3, E5M2, S2F6
from lightning_nvfp4.ops import apply_tensor_scales, matmul, quantize
from lightning_nvfp4.ops.reference.hadamard import inverse
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_values_equal

FP32_MAX = torch.finfo(torch.float32).max


def exact_in_bf16(values: torch.Tensor) -> bool:
    return torch.equal(values.to(torch.bfloat16).to(torch.float64), values)


def test_every_nvfp4_code_and_scale_is_exact_in_bf16() -> None:
    scales = torch.tensor([v for v in E4M3.values if abs(v) <= E4M3.max], dtype=torch.float64)
    assert exact_in_bf16(torch.outer(torch.tensor(E2M1.values, dtype=torch.float64), scales))


@pytest.mark.parametrize(("element", "lowest"), [(E4M3, 3), (E5M2, 10), (S2F6, 0)], ids=lambda e: str(e)[:40])
def test_every_e8m0_code_and_scale_is_exact_in_bf16_from_a_lowest_scale_code(element, lowest: int) -> None:
    codes = torch.tensor([v for v in element.values if abs(v) <= element.max], dtype=torch.float64)
    for code in range(lowest, 254 - element.max_exponent + 1):  # above, the product itself leaves the range
        assert exact_in_bf16(codes * 2.0 ** (code - 127)), code
    if lowest:
        assert not exact_in_bf16(codes * 2.0 ** (lowest - 1 - 127)), "the lowest code is lower than stated"


def test_products_are_exact_and_scales_come_last() -> None:
    a, b = torch.randn(9, 64), torch.randn(5, 64)
    for spec in (QuantSpec(), QuantSpec(tensor_scale="row"), QuantSpec("mxfp8"), QuantSpec(block=(16, 16))):
        qa, qb = quantize(a, spec), quantize(b, spec)
        exact = qa.unscaled_values().double() @ qb.unscaled_values().double().T
        if qa.tensor_scale is not None and qb.tensor_scale is not None:
            column = qb.tensor_scale if qb.tensor_scale.ndim == 0 else qb.tensor_scale.T
            exact = exact * qa.tensor_scale.double() * column.double()
        torch.testing.assert_close(matmul(qa, qb).double(), exact, rtol=2e-6, atol=1e-6)


def test_the_quantized_dim_is_the_contracted_one() -> None:
    x_MK, dy_MN = torch.randn(32, 24), torch.randn(32, 8)
    dw_NK = matmul(quantize(dy_MN, QuantSpec(), dim=0), quantize(x_MK, QuantSpec(), dim=0))
    assert dw_NK.shape == (8, 24)
    decoded = quantize(dy_MN, QuantSpec(), dim=0).dequantize().T @ quantize(x_MK, QuantSpec(), dim=0).dequantize()
    torch.testing.assert_close(dw_NK, decoded, rtol=1e-5, atol=1e-5)


def test_transforms_on_both_operands_cancel() -> None:
    """In float64, decoding with or without the inverse gives one product, whatever the length."""
    a, b = torch.randn(6, 72), torch.randn(4, 72)
    for n in (16, 32, 64, 128):
        spec = QuantSpec(hadamard=n)  # pyright: ignore[reportArgumentType]
        qa, qb = quantize(a, spec), quantize(b, spec)
        assert qa.tensor_scale is not None and qb.tensor_scale is not None
        inside = qa.unscaled_values().double() @ qb.unscaled_values().double().T
        inside = inside * qa.tensor_scale.double() * qb.tensor_scale.double()
        # The inverse of every whole row, the added elements included.
        back = [inverse(q.unscaled_values().double() * q.tensor_scale.double(), spec) for q in (qa, qb)]  # pyright: ignore
        torch.testing.assert_close(inside, back[0] @ back[1].T, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(matmul(qa, qb).double(), inside, rtol=1e-5, atol=1e-5)


def test_a_plain_operand() -> None:
    a, b = torch.randn(4, 32), torch.randn(3, 32).bfloat16()
    q = quantize(a, QuantSpec("mxfp8"))
    torch.testing.assert_close(matmul(q, b), q.unscaled_values() @ b.float().T)
    assert_values_equal(matmul(b, b), b.float() @ b.float().T)


@pytest.mark.parametrize(
    ("product", "row", "column"),
    list(itertools.product((3.0, 1e30, 1e-30, 0.0), (1e-38, 1e38, 3e-41, 1.0), (1e-38, 1e38, 2.0))),
)
def test_scales_overflow_only_with_the_result(product: float, row: float, column: float) -> None:
    tensors = [torch.tensor([[v]]) for v in (product, row, column)]
    result = apply_tensor_scales(*tensors).double().item()
    exact = tensors[0].double().item() * tensors[1].double().item() * tensors[2].double().item()
    if abs(exact) > FP32_MAX:
        assert result == float("inf")
    else:
        assert abs(result - exact) <= abs(exact) * 2.0**-22 + 2.0**-149


def test_scales_are_plain_products_in_the_normal_range() -> None:
    product, row, column = torch.randn(8, 6) * 100, torch.rand(8, 1), torch.rand(1, 6)
    assert_values_equal(apply_tensor_scales(product, row, column), product * row * column)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (QuantSpec(hadamard=16), QuantSpec(), "does not cancel"),
        (QuantSpec(hadamard=16), QuantSpec(hadamard=16, hadamard_signs=(1,)), "does not cancel"),
        (QuantSpec(hadamard=16), QuantSpec(hadamard=32), "does not cancel"),
    ],
)
def test_transforms_that_do_not_cancel_are_refused(a: QuantSpec, b: QuantSpec, words: str) -> None:
    x = torch.randn(4, 64)
    with pytest.raises(UserError, match=words):
        matmul(quantize(x, a), quantize(x, b))


def test_operands_that_do_not_fit_are_refused() -> None:
    q = quantize(torch.randn(4, 64), QuantSpec())
    with pytest.raises(UserError, match="contracted length 64 and b 32"):
        matmul(q, torch.randn(4, 32))
    with pytest.raises(UserError, match="2D operands"):
        matmul(q, torch.randn(64))
    with pytest.raises(UserError, match="2D operands"):
        matmul(quantize(torch.randn(2, 4, 64), QuantSpec()), q)
    blocks = quantize(torch.randn(4, 64), QuantSpec(), amax=torch.ones(1, 4))
    with pytest.raises(UserError, match="varies along the contracted dim"):
        matmul(blocks, q)

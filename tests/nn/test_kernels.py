"""The three GEMMs on the Triton kernels against the reference: on a GPU, or in the interpreter."""

import pytest
import torch

from lightning_nvfp4 import PRESETS
from lightning_nvfp4.nn import experts
from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.experts import route, sum_choices
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.ops.backends import kernels
from lightning_nvfp4.testing import sqnr_db

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def gradients(preset, backend, rows, n, k):
    gemm = PRESETS[preset].gemms["experts"]
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    counts = (rows, 0, 2 * rows) if rows % gemm.tokens_alignment == 0 and rows > 1 else (rows,)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    x, w, bias = leaf(sum(counts), k), leaf(len(counts), n, k), leaf(len(counts), n)
    numerics = LayerNumerics(gemm, NumericsContext(step_seed=3), 1, backend)
    y = grouped_linear(x, w, bias, counts, numerics, torch.float32)
    y.backward(torch.randn(sum(counts), n, generator=generator).to(device))
    return [t.detach().cpu() for t in (y, x.grad, w.grad, bias.grad)]


@pytest.mark.parametrize(("rows", "n", "k"), [(32, 48, 40), (128, 32, 32), (7, 5, 3), (1, 1, 1)])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_gemm_is_the_references(preset, rows, n, k):
    """The operands' bits are equal; sums may differ in their order. Rows of 7 and 1 are no whole transforms."""
    for ours, reference in zip(
        gradients(preset, "triton", rows, n, k), gradients(preset, "reference", rows, n, k), strict=True
    ):
        assert sqnr_db(ours, reference) > 110


@pytest.mark.parametrize("weighted", [True, False])
def test_the_sum_of_a_tokens_choices_has_the_bits_of_one_after_the_other(weighted, monkeypatch):
    """Also of choices without expert, which count as zeros."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.tensor([[2, 0], [0, 9], [9, 9], [1, 2], [0, 2]], device=device)
    routing = route(ids, 3, 4, on_device=True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(routing.choices), 96, generator=generator).to(device, torch.bfloat16)
    weights = torch.rand(5, 2, generator=generator).to(device) if weighted else None
    fused = []
    monkeypatch.setattr(experts, "sum_rows", lambda *a: fused.append(kernels().sum_rows(a[0], None, a[1])) or fused[0])
    found = sum_choices(rows, weights, routing, torch.float32)
    monkeypatch.setattr(experts, "sum_rows", lambda *a: None)
    assert fused and torch.equal(found, sum_choices(rows, weights, routing, torch.float32))
    assert not found[2].any()

"""NVFP4 against Transformer Engine's Python reference, byte for byte; -0.0 and NaN against its kernels' arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_nvfp4.ops import QuantizedTensor, hadamard_transform, quantize
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_scales_equal, assert_values_equal, assert_within_steps

ROW = QuantSpec(tensor_scale="row")
TILE = QuantSpec(block=(16, 16))
NO_SIGNS = QuantSpec(hadamard=16, hadamard_signs=(1,))
CASES = {
    "1d_bf16": (QuantSpec(), QuantSpec()),
    "1d_fp32": (QuantSpec(), QuantSpec()),
    "1d_fp16": (QuantSpec(), QuantSpec()),
    "1d_heavy": (QuantSpec(), QuantSpec()),
    "2d_bf16": (TILE, TILE),
    "2d_fp32": (TILE, TILE),
    "rht_bf16": (QuantSpec(), QuantSpec(hadamard=16)),
    "rht_nosign_bf16": (QuantSpec(), NO_SIGNS),
    "rowscaled_bf16": (ROW, ROW),
    "rowscaled_fp32": (ROW, ROW),
}
EDGES = (
    *("zero", "zero_blocks", "tiny_bf16", "subnormal_fp32", "huge_bf16", "huge_fp32", "scale_subnormal"),
    *("scale_ties", "scale_ties_s", "scale_rounding", "e2m1_ties", "neg_zero"),
)


def assert_equal(q: QuantizedTensor, codes: Tensor, scales: Tensor, amax: Tensor | None = None) -> None:
    assert_codes_equal(q.codes, codes)
    assert_scales_equal(q.block_scale, scales)
    if amax is not None:
        assert q.amax is not None
        assert_values_equal(q.amax.reshape(-1), amax.reshape(-1), "amax")


@pytest.mark.parametrize("case", CASES)
def test_both_directions(golden, case: str) -> None:
    t = golden("nvfp4")
    x = t[f"{case}.x"]
    for direction, spec, dim in zip(("rowwise", "columnwise"), CASES[case], (1, 0), strict=True):
        q = quantize(x, spec, dim=dim)
        assert_equal(q, t[f"{case}.{direction}_data"], t[f"{case}.{direction}_scale"], t[f"{case}.amax_{direction}"])
        decoded = t.get(f"{case}.dequant_{direction}")
        if decoded is not None and not spec.hadamard:
            ours = q.dequantize() if dim == 1 else q.dequantize().T
            assert_within_steps(ours, decoded, decoded.double().abs(), steps=1e-6)


@pytest.mark.parametrize("case", ["rht_bf16", "rht_nosign_bf16"])
def test_the_transform_is_rounded_exactly(golden, case: str) -> None:
    t = golden("nvfp4")
    y = hadamard_transform(t[f"{case}.x"], CASES[case][1], dim=0)
    assert_values_equal(y.T.to(torch.bfloat16), t[f"{case}.rht_t"])


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("blocks", ["1d", "2d", "rowscaled"])
def test_four_over_six(golden, blocks: str, error: str) -> None:
    t = golden("nvfp4")
    case, source = f"4over6_{blocks}_{error}_256", "4over6_2d.x" if blocks == "2d" else "4over6_1d.x"
    spec = QuantSpec(
        four_over_six=error,  # pyright: ignore[reportArgumentType]
        block=(16, 16) if blocks == "2d" else (1, 16),
        tensor_scale="row" if blocks == "rowscaled" else "tensor",
    )
    q = quantize(t[source], spec)
    assert_equal(q, t[f"{case}.rowwise_data"], t[f"{case}.rowwise_scale"], t[f"{case}.amax_rowwise"])
    if blocks != "rowscaled":
        q = quantize(t[source], spec, dim=0)
        assert_equal(q, t[f"{case}.columnwise_data"], t[f"{case}.columnwise_scale"], t[f"{case}.amax_columnwise"])
        six = quantize(t[source], QuantSpec(block=spec.block), dim=0)
        assert not torch.equal(q.codes, six.codes), "four over six chose nothing: the case proves nothing"


@pytest.mark.parametrize("edge", EDGES)
def test_finite_edges(golden, edge: str) -> None:
    t = golden("nvfp4")
    q = quantize(t[f"edge_{edge}.x"], QuantSpec())
    assert_equal(q, t[f"edge_{edge}.kernel_emul.data"], t[f"edge_{edge}.kernel_emul.scale"])


@pytest.mark.parametrize("edge", ["nan", "pos_inf", "neg_inf"])
def test_nonfinite_edges_in_their_finite_blocks(golden, edge: str) -> None:
    t = golden("nvfp4")
    x = t[f"edge_{edge}.x"]
    # The kernels' amax of a tensor with infinity is infinite, ours is over finite elements: give them the same one.
    amax = None if edge == "nan" else torch.tensor(float("inf"))
    q = quantize(x, QuantSpec(), amax=amax)
    finite = x.float().isfinite().unflatten(-1, (-1, 16)).all(-1)
    assert_scales_equal(q.block_scale, t[f"edge_{edge}.kernel_emul.scale"], where=finite)
    assert_codes_equal(q.codes, t[f"edge_{edge}.kernel_emul.data"], where=finite.repeat_interleave(8, dim=-1))
    assert not finite.all() and bool((q.block_scale[~finite] == 0x7F).all())
    assert bool(q.dequantize().unflatten(-1, (-1, 16))[~finite].isnan().all())

"""The compiled kernels against the torch definition, bit for bit, and the way back where there is no compiler."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import torch

from lightning_nvfp4.ops import finite_amax, hadamard_transform, quantize
from lightning_nvfp4.ops.layout import pad_last, stored_length
from lightning_nvfp4.ops.reference import fast, native
from lightning_nvfp4.ops.reference import quantize as definition
from lightning_nvfp4.ops.reference.hadamard import transform
from lightning_nvfp4.ops.reference.philox import draw, seed_tensor
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_scales_equal, assert_values_equal

FORMATS = (
    *(QuantSpec(), QuantSpec(tensor_scale="row"), QuantSpec(block=(16, 16)), QuantSpec(hadamard=64)),
    *(QuantSpec("mxfp8"), QuantSpec("mxfp8", element="e5m2"), QuantSpec("mxfp8", block=(32, 32), hadamard=16)),
    *(QuantSpec("mxfp8", scale_rule="floor"), QuantSpec("s2f6"), QuantSpec("s2f6", hadamard=128, scale_rule="floor")),
    *(QuantSpec("fp8_block"), QuantSpec("fp8_block", element="e5m2", block=(128, 128))),
)
ROUNDINGS = ({}, {"rounding": "stochastic"}, {"rounding": "stochastic", "sr_bits": 8})
SPECS = [QuantSpec(**{**vars(spec), **rounding}) for spec in FORMATS for rounding in ROUNDINGS]


@pytest.fixture(scope="module")
def kernels() -> native.Kernels:
    if native.library() is None:
        pytest.skip("there is no C compiler")
    found = fast.kernels()
    assert found is not None, "the compiled kernels disagree with the definition"
    return found


def hard(*shape: int) -> torch.Tensor:
    """Numbers of all magnitudes with zeros of both signs, subnormals, ties, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator)
    flat = x.view(-1)
    flat *= torch.randint(-3, 3, flat.shape, generator=generator).float().exp2()
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3.3e38, 0.25, 2.5, -5.0, 1e-30, float("nan"), float("inf")])
    places = torch.randperm(len(flat), generator=generator)[: max(1, len(flat) // 40)]
    flat[places] = special[torch.arange(len(places)) % len(special)]
    return x


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equal_bits(kernels: native.Kernels, spec: QuantSpec) -> None:
    for x in (hard(37, 150), hard(64, 64).bfloat16(), hard(3, 34, 40), hard(21), torch.rand(70, 130)):
        for dim in range(x.ndim):
            codes, scales, tensor_scale, amax = fast.quantize(kernels, x, spec, dim, 9, None, packed=True)
            expected = definition.quantize_packed(x, spec, dim, 9, None)
            assert scales is not None
            assert_codes_equal(codes, expected[0])
            assert_scales_equal(scales, expected[1])
            if tensor_scale is not None and amax is not None:
                assert expected[2] is not None and expected[3] is not None
                assert_values_equal(tensor_scale, expected[2])
                assert_values_equal(amax, expected[3])
            values = fast.quantize(kernels, x, spec, dim, 9, None, packed=False)[0]
            assert_values_equal(values, definition.quantize_unpacked(x, spec, dim, 9, None)[0])
            length = stored_length(x.shape[dim], spec)
            assert_values_equal(kernels.decode(codes, scales, spec, length), values)


def scale_edges(length: int) -> torch.Tensor:
    """Return blocks whose amax lies at, just below and just above where scales change, over the whole range of FP32."""
    marks = torch.tensor([1.0, 1.75, 1.984375, 1.5], dtype=torch.float64)
    amax = torch.outer(torch.arange(-149, 128, dtype=torch.float64).exp2(), marks).flatten().float()
    bits = torch.cat([amax.view(torch.int32) + step for step in (-1, 0, 1)]).clamp(0, 0x7F7FFFFF)
    return bits.view(torch.float32).unsqueeze(1) * torch.linspace(1.0, -0.9, length)


def scale_ties(length: int) -> torch.Tensor:
    """Return blocks whose amax is each BF16 number up to 7.875, under which the E4M3 scale meets many ties."""
    top = torch.tensor(7.875, dtype=torch.bfloat16).view(torch.int16)
    amax = torch.arange(int(top) - 1200, int(top) + 1, dtype=torch.int16).view(torch.bfloat16).float()
    return amax.unsqueeze(1) * torch.linspace(1.0, -0.9, length)


@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_equal_bits_where_scales_change(kernels: native.Kernels, spec: QuantSpec) -> None:
    spec = QuantSpec(**{**vars(spec), "hadamard": 0, "block": (1, spec.block[1] if spec.block else 0)})
    assert spec.block is not None
    edges = scale_edges(spec.block[1])
    assert len(edges) > 3000
    row = QuantSpec(**{**vars(spec), "tensor_scale": "row"}) if spec.format == "nvfp4" else spec
    for x, case in ((edges, row), (scale_ties(spec.block[1]), spec)):
        found = fast.quantize(kernels, x, case, 1, 9, None, packed=True)[:2]
        for ours, expected in zip(found, definition.quantize_packed(x, case, 1, 9, None)[:2], strict=True):
            assert ours is not None
            assert_codes_equal(ours, expected)


def test_explicit_amax_along_rows_and_blocks(kernels: native.Kernels) -> None:
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    for shape in ((), (20, 1), (1, 4), (20, 4)):
        amax = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 2.0
        for spec in (QuantSpec(), QuantSpec(rounding="stochastic")):
            fast_codes = fast.quantize(kernels, x, spec, 1, 3, amax, packed=True)[:2]
            for ours, expected in zip(fast_codes, definition.quantize_packed(x, spec, 1, 3, amax)[:2], strict=True):
                assert ours is not None
                assert_codes_equal(ours, expected)


def test_random_words(kernels: native.Kernels) -> None:
    for seed in (0, 7, -1, 2**63 + 5):
        words = draw(seed_tensor(seed), torch.arange(300)).flatten()
        assert_codes_equal(kernels.random(seed, 1198), words[:1198])


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_transform(n: int) -> None:
    x, spec = torch.randn(9, 200) * 2.0 ** torch.arange(200).float().sub(100), QuantSpec(hadamard=n)  # pyright: ignore
    assert_values_equal(hadamard_transform(x, spec), transform(pad_last(x, n), spec))
    assert_values_equal(hadamard_transform(x, spec, dim=0), transform(pad_last(x.T, n), spec).T)


def test_threads_do_not_change_bits(kernels: native.Kernels) -> None:
    x, spec = torch.randn(1024, 256), QuantSpec(rounding="stochastic", hadamard=16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = quantize(x, spec, seed=5)
        torch.set_num_threads(2)
        two = quantize(x, spec, seed=5)
    finally:
        torch.set_num_threads(before)
    assert_codes_equal(one.codes, two.codes)
    assert_scales_equal(one.block_scale, two.block_scale)


def test_without_a_compiler_the_definition_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, spec = hard(8, 64), QuantSpec(rounding="stochastic")
    before = quantize(x, spec, seed=3)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(native, "library", functools.cache(native.library.__wrapped__))
    monkeypatch.setattr(fast, "library", native.library)
    monkeypatch.setattr(fast, "kernels", functools.cache(fast.kernels.__wrapped__))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert_codes_equal(quantize(x, spec, seed=3).codes, before.codes)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "No C compiler found" in caplog.text


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native, "_FLAGS", ("-no-such-flag-at-all",))
    with caplog.at_level(logging.INFO):
        assert native.library.__wrapped__() is None
    assert "did not compile" in caplog.text or "No C compiler" in caplog.text


def test_kernels_are_compiled_once(kernels: native.Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_NVFP4_CACHE", str(tmp_path))
    assert native.library.__wrapped__() is not None
    (built,) = native.kernel_folder().iterdir()
    stamp = built.stat().st_mtime_ns
    assert native.library.__wrapped__() is not None
    assert [path.stat().st_mtime_ns for path in native.kernel_folder().iterdir()] == [stamp]


def test_kernels_that_disagree_are_not_used(
    kernels: native.Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: native.Kernels, *args: object) -> torch.Tensor:
        return true_decode(self, *args) * 2  # pyright: ignore[reportArgumentType]

    true_decode = native.Kernels.decode
    monkeypatch.setattr(native.Kernels, "decode", wrong)
    with caplog.at_level(logging.INFO):
        assert fast.kernels.__wrapped__() is None
    assert "disagree" in caplog.text


def test_finite_amax() -> None:
    x = torch.tensor([[1.0, -3.0, float("nan")], [float("-inf"), 0.5, 2.0]], dtype=torch.bfloat16)
    assert finite_amax(x).item() == 3.0
    assert finite_amax(x, 1).tolist() == [3.0, 2.0]
    assert finite_amax(x, -2, keepdim=True).tolist() == [[1.0, 3.0, 2.0]]
    assert finite_amax(x[:0]).item() == 0.0 and finite_amax(x[:, :0], 1).tolist() == [0.0, 0.0]

"""The start-up test passes here, and fails where a kernel is wrong."""

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops import self_test

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_passes(device):
    results = self_test.run(device)
    assert len(results) > 8
    assert not [(result.name, result.detail) for result in results if not result.passed]


@pytest.mark.parametrize("fault", ["seed", "answer", "crash"])
def test_a_wrong_kernel_is_named_and_stops_the_start(fault, monkeypatch):
    original = self_test.quantize_values

    def broken(x, spec, **options):
        if fault == "crash":
            raise RuntimeError("no such kernel")
        values, scale = original(x, spec, **options)
        return (values.clamp(max=32.0) if fault == "seed" else values * 1.5), scale

    monkeypatch.setattr(self_test, "quantize_values", broken)
    self_test.require.cache_clear()
    failed = {result.name for result in self_test.run("cpu") if not result.passed}
    assert "stochastic rounding is unbiased" in failed
    with pytest.raises(UserError, match=r"self-test of cpu failed.*stochastic rounding.*backend='reference'"):
        self_test.require(torch.device("cpu"))
    self_test.require.cache_clear()

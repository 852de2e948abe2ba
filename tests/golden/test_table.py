"""A small table of other people's values that travels with the tests; its metadata names the sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_nvfp4.ops import quantize
from lightning_nvfp4.ops.reference.philox import draw, seed_tensor
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.testing import assert_codes_equal, assert_scales_equal

PATH = Path(__file__).with_name("table.safetensors")
SPECS = {
    "nvfp4": QuantSpec(),
    "nvfp4_ties": QuantSpec(),
    "nvfp4_2d": QuantSpec(block=(16, 16)),
    "mxfp8_e4m3": QuantSpec("mxfp8"),
    "mxfp8_e5m2": QuantSpec("mxfp8", element="e5m2"),
    "s2f6": QuantSpec("s2f6", hadamard=0),
}


@pytest.mark.parametrize("name", SPECS)
def test_codes_and_scales(name: str) -> None:
    t = load_file(PATH)
    amax = t[f"{name}.amax"].reshape(()) if f"{name}.amax" in t else None
    q = quantize(t[f"{name}.x"], SPECS[name], amax=amax)
    assert_codes_equal(q.codes, t[f"{name}.codes"])
    assert_scales_equal(q.block_scale, t[f"{name}.block_scale"])


def test_random_words() -> None:
    t = load_file(PATH)
    for (seed, _, offset), expected in zip(t["philox.seed_subsequence_offset"].tolist(), t["philox.u32"], strict=True):
        words = draw(seed_tensor(seed), offset + torch.arange(8)).flatten()
        assert_codes_equal(words.to(torch.int64) & 0xFFFFFFFF, expected)


def test_the_table_is_small_and_names_its_sources() -> None:
    assert PATH.stat().st_size <= 50_000
    with safe_open(PATH, "pt") as file:
        assert "TransformerEngine" in file.metadata()["source"]

"""Stochastic rounding against exact neighbours and probabilities, by count."""

from __future__ import annotations

import pytest
import torch

from lightning_nvfp4.formats import ELEMENTS
from lightning_nvfp4.ops.reference import fast
from lightning_nvfp4.ops.reference.elements import encode_float, round_float
from lightning_nvfp4.ops.reference.philox import draw, seed_tensor
from lightning_nvfp4.testing import assert_codes_equal, assert_unbiased

DRAWS = 1 << 12


def random_words(rows: int, draws: int, seed: int) -> torch.Tensor:
    compiled = fast.kernels()
    if compiled is not None:
        return compiled.random(seed, rows * draws).view(rows, draws)
    counter = torch.arange(-(-rows * draws // 4))
    return draw(seed_tensor(seed), counter).flatten()[: rows * draws].view(rows, draws)


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_neighbours_and_probabilities(golden, name: str, bits: int) -> None:
    t, element = golden("stochastic_rounding"), ELEMENTS[name]
    x = t[f"{name}.x"]
    random = random_words(len(x), DRAWS, seed=2024 + bits)
    rounded = round_float(x.unsqueeze(-1).expand(len(x), DRAWS).contiguous(), element, random, bits)
    codes = encode_float(rounded, element)
    toward, away = t[f"{name}.toward_zero_code"].unsqueeze(-1), t[f"{name}.away_code"].unsqueeze(-1)
    assert bool(((codes == toward) | (codes == away)).all()), "a value left its two neighbours"
    probability = t[f"{name}.p_away"] if bits == 32 else t[f"{name}.p_away_8bit"].double() / 256
    moved = (codes == away) & (toward != away)
    assert_unbiased(moved.sum(-1), DRAWS, probability)


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_eight_bits_count_exactly(golden, name: str) -> None:
    """All 256 random values, once each: floor(256 p) of them go away from zero, as in TE's software rounding."""
    t, element = golden("stochastic_rounding"), ELEMENTS[name]
    x = t[f"{name}.x"]
    random = (torch.arange(256) << 24).to(torch.int32).expand(len(x), 256)
    rounded = round_float(x.unsqueeze(-1).expand(len(x), 256).contiguous(), element, random, 8)
    away = (encode_float(rounded, element) == t[f"{name}.away_code"].unsqueeze(-1)).sum(-1)
    interior = t[f"{name}.toward_zero_code"] != t[f"{name}.away_code"]
    assert_codes_equal(away, t[f"{name}.p_away_8bit"], where=interior)


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_thirty_two_bits_split_at_the_exact_probability(golden, name: str) -> None:
    """The largest random word that still goes away is p * 2^32 - 1, rounded down."""
    t, element = golden("stochastic_rounding"), ELEMENTS[name]
    x, p = t[f"{name}.x"], t[f"{name}.p_away"]
    threshold = (p * 2.0**32).floor().to(torch.int64)
    inside = (threshold > 0) & (threshold < 2**32)
    x, threshold = x[inside], threshold[inside]
    for word, away in ((threshold - 1, True), (threshold, False)):
        rounded = encode_float(round_float(x, element, word.to(torch.int32)), element)
        expected = t[f"{name}.away_code" if away else f"{name}.toward_zero_code"][inside]
        assert_codes_equal(rounded, expected)

"""The formats as data, against the tables of the standards."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_nvfp4.formats import BLOCK_FORMATS, E2M1, E4M3, E5M2, E8M0, ELEMENTS, HADAMARD_SIGNS, S2F6
from lightning_nvfp4.formats.block import FOUR_OVER_SIX_RANGE, NVFP4_RANGE


def test_e2m1_is_the_table_of_the_standard() -> None:
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1.values == positive + tuple(-v for v in positive)
    assert math.copysign(1.0, E2M1.values[8]) == -1.0


@pytest.mark.parametrize(
    ("element", "largest", "smallest_normal", "smallest", "nans"),
    [
        (E4M3, 448.0, 2.0**-6, 2.0**-9, 2),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 6),
    ],
)
def test_fp8_limits(element, largest: float, smallest_normal: float, smallest: float, nans: int) -> None:
    finite = [v for v in element.values if math.isfinite(v)]
    assert element.max == max(finite) == largest
    assert 2.0**element.min_exponent == smallest_normal
    assert min(v for v in finite if v > 0) == smallest
    assert sum(math.isnan(v) for v in element.values) == nans
    assert math.isnan(element.values[element.nan_code])


def test_e8m0_and_s2f6_limits() -> None:
    assert (E8M0.values[0], E8M0.values[127], E8M0.max) == (2.0**-127, 1.0, 2.0**127)
    assert math.isnan(E8M0.values[255])
    assert (S2F6.max, min(S2F6.values), S2F6.values[255]) == (1.984375, -2.0, -(2.0**-6))


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_codes_are_a_closed_range(element) -> None:
    assert len(element.values) == 1 << element.bits
    with pytest.raises(ValueError, match=f"{element.name} has codes"):
        element.decode(1 << element.bits)


def test_positive_codes_are_in_order_of_their_values() -> None:
    for element in (E2M1, E4M3, E5M2, E8M0, S2F6):
        positive = [element.values[code] for code in range(element.max_code + 1)]
        assert positive == sorted(set(positive))


def test_block_formats() -> None:
    stored = {name: block.bits_per_element for name, block in BLOCK_FORMATS.items()}
    assert stored == {"nvfp4": 4.5, "mxfp8": 8.25, "s2f6": 8.25, "fp8_block": 8.0625}
    assert (NVFP4_RANGE, FOUR_OVER_SIX_RANGE) == (2688.0, 1536.0)


def test_signs_are_the_published_mask() -> None:
    assert sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0) == 0xD7E8


def test_the_formats_load_without_torch() -> None:
    code = (
        "import sys, types; p = types.ModuleType('lightning_nvfp4'); p.__path__ = [sys.argv[1]]; "
        "sys.modules['lightning_nvfp4'] = p; import lightning_nvfp4.formats; assert 'torch' not in sys.modules"
    )
    package = Path(sys.modules["lightning_nvfp4"].__file__ or "").parent
    subprocess.run([sys.executable, "-c", code, str(package)], check=True, timeout=60)


def test_the_numbers_of_the_formats_are_typed_once() -> None:
    package = Path(sys.modules["lightning_nvfp4"].__file__ or "").parent
    number = re.compile(r"(?<![\w.])(448|2688|57344|1\.984375|0xD7E8|0xD2511F53)(\.0)?(?![\w.])")
    found = []
    for path in [*package.rglob("*.py"), *package.rglob("*.c")]:
        if path.is_relative_to(package / "formats"):
            continue
        text = re.sub(r'""".*?"""|#.*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{path.name}: {match.group()}" for match in number.finditer(text)]
    assert not found

"""The start-up test of a device: every kind of kernel against known answers."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats.element import E4M3, E5M2, ElementFormat
from lightning_nvfp4.ops.gemm import rows_matmul, tokens_matmul
from lightning_nvfp4.ops.groups import Groups
from lightning_nvfp4.ops.reference.elements import decode_float
from lightning_nvfp4.ops.select import quantize, quantize_values, quantize_values_twice, requantize_values
from lightning_nvfp4.recipe import QuantSpec

_SEED = 7
_DRAWS = 1 << 14
_ROW, _MX = QuantSpec(tensor_scale="row"), QuantSpec("mxfp8")
_MX_SR = QuantSpec("mxfp8", rounding="stochastic")
_KNOWN = {
    "nvfp4, row scale": (_ROW, 0x008D6EFE),
    "nvfp4, 16x16": (QuantSpec(block=(16, 16)), 0x3DDB677C),
    "nvfp4, RHT, stochastic": (QuantSpec(hadamard=16, rounding="stochastic"), 0x1864F6D8),
    "mxfp8": (_MX, 0x08FB43E3),
    "mxfp8, stochastic": (_MX_SR, 0xC6E81C73),
    "s2f6": (QuantSpec("s2f6"), 0xA5E069CB),
    "fp8_block": (QuantSpec("fp8_block"), 0xCBF8D26A),
}
"""Format -> spec and the CRC-32 of the codes and scales that it gives for the sample."""


@dataclass(frozen=True)
class Result:
    """One test: its name, whether it held, how long it took, and what was seen if it did not hold."""

    name: str
    passed: bool
    seconds: float
    detail: str = ""


def run(device: torch.device | str) -> list[Result]:
    """Run every test on a device, with the backend that ``auto`` takes there."""
    device = torch.device(device)
    tests: dict[str, Callable[[], str]] = {
        **{name: functools.partial(_known_answer, spec, crc, device) for name, (spec, crc) in _KNOWN.items()},
        "rounding to FP8 down columns": lambda: _columns(device),
        "both directions in one pass": lambda: _one_pass(device),
        "stochastic rounding is unbiased": lambda: _unbiased(device),
        "grouped GEMM": lambda: _grouped(device),
    }
    results = []
    for name, test in tests.items():
        start = time.perf_counter()
        try:
            detail = test()
        except Exception as error:  # a kernel that does not build or run is a finding too
            detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        results.append(Result(name, not detail, time.perf_counter() - start, detail))
    return results


@functools.cache
def require(device: torch.device) -> None:
    """Run the tests once in this process.

    Raises:
        UserError: a test failed; training would go on with other numbers than the recipe's.
    """
    failed = [result for result in run(device) if not result.passed]
    if failed:
        found = "; ".join(f"{result.name}: {result.detail}" for result in failed)
        raise UserError(
            f"the self-test of {device} failed ({found}). Use backend='reference' and report it with `nvfp4 doctor`."
        )


def sample() -> Tensor:
    """Return (48, 160) float32 numbers over twenty binades, by exact arithmetic only."""
    i = torch.arange(48 * 160, dtype=torch.int64)
    mixed = (i * 2654435761) % 65521
    x = (mixed - 32760).to(torch.float32) * ((mixed % 21) - 10).to(torch.float32).exp2()
    return x.reshape(48, 160)


def checksum(spec: QuantSpec, device: torch.device | str) -> int:
    """Return the CRC-32 of the sample's codes and scales along both dims."""
    x, crc = sample().to(device), 0
    for dim in (1, 0):
        q = quantize(x, spec, dim=dim, seed=_SEED)
        for part in (q.codes, q.block_scale, q.tensor_scale):
            if part is not None:
                crc = zlib.crc32(part.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _known_answer(spec: QuantSpec, crc: int, device: torch.device) -> str:
    found = checksum(spec, device)
    return "" if found == crc else f"checksum {found:#010x}, known {crc:#010x}"


def every_rounding(element: ElementFormat) -> Tensor:
    """Return (32 n, 64) float32 numbers for blocks down columns with scale 1.

    They are every value of an element type, every midpoint of two, what is next to either, and their opposites.
    """
    magnitudes = torch.arange(element.max_code + 1, dtype=torch.int32)
    values = decode_float(magnitudes, element)
    exact = torch.cat((values, (values[1:] + values[:-1]) / 2))
    bits = exact.view(torch.int32)
    near = torch.cat((bits - 1, bits, bits + 1))
    near = near[(near >= 0) & (near <= int(values[-1:].view(torch.int32)))].view(torch.float32)
    both = torch.cat((near, -near))
    rows = -(-len(both) // (31 * 64)) * 31
    filled = torch.zeros(rows * 64).index_copy_(0, torch.arange(len(both)), both).reshape(-1, 31, 64)
    return torch.cat((torch.full_like(filled[:, :1], element.max), filled), 1).reshape(-1, 64)


def _columns(device: torch.device) -> str:
    for spec, element in ((_MX, E4M3), (QuantSpec("mxfp8", element="e5m2"), E5M2)):
        x = every_rounding(element)
        known = quantize(x, spec, dim=0, backend="reference").codes
        if not torch.equal(quantize(x.to(device), spec, dim=0).codes.cpu(), known):
            return f"{element.name} differs"
    return ""


def _one_pass(device: torch.device) -> str:
    x = sample().to(device)
    for ours, dim in zip(quantize_values_twice(x, _MX_SR, _MX_SR, seed=_SEED), (1, 0), strict=True):
        if not torch.equal(ours, quantize_values(x, _MX_SR, dim=dim, seed=_SEED)[0]):
            return f"differs along dim {dim}"
    packed = quantize(x, _ROW)
    ours, _ = requantize_values(packed, _MX, dim=0)
    return "" if torch.equal(ours, quantize_values(packed.dequantize(), _MX, dim=0)[0]) else "requantization differs"


def _unbiased(device: torch.device) -> str:
    """Values a quarter above a code, in blocks with scale 1: one in four goes up."""
    x = torch.full((_DRAWS // 16, 32), 32.0 + 1.0, device=device)
    x[:, ::2] = E4M3.max
    up = (quantize_values(x, _MX_SR, seed=_SEED)[0][:, 1::2] > 32.0).double()
    if not bool(((up == 0) | (up == 1)).all()) or float(up.sum()) == 0:
        return "nothing is rounded up"
    z = (float(up.mean()) - 0.25) / (0.25 * 0.75 / up.numel()) ** 0.5
    return "" if abs(z) < 5 else f"P(up) is {float(up.mean()):.4f} for 1/4, z = {z:.1f}"


def _grouped(device: torch.device) -> str:
    """Products of small integers are exact in any order of the sum."""
    generator = torch.Generator().manual_seed(_SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(device, dtype)

    groups, x, w = Groups.of((64, 0, 96)), integers(160, 64), integers(3, 80, 64)
    halves, fours = torch.full((160, 1), 0.5, device=device), torch.full((3, 1), 4.0, device=device)
    y = rows_matmul(x, w, groups, transposed=True, row_scale=halves, column_scale=fours)
    expected = torch.cat((x[:64].double() @ w[0].double().T, x[64:].double() @ w[2].double().T)) * 2
    if not torch.equal(y.double(), expected):
        return "rows differ"
    dw = tokens_matmul(integers(160, 80), x, groups)
    return "" if bool((dw[1] == 0).all()) and bool(dw.isfinite().all()) else "an expert without tokens has a gradient"

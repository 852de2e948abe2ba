"""Time every Triton kernel on a GPU as a share of the rate of a device-to-device copy.

    python benchmarks/bench_kernels.py [--rows 32768] [--columns 8192] [--csv bench_kernels.csv]

Bytes are those that must move: each input read once, each output written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from timing import show
from triton.testing import do_bench

from lightning_nvfp4.ops import (
    quantize,
    quantize_values,
    quantize_values_twice,
    quantize_with_values,
    requantize_values,
)
from lightning_nvfp4.ops.triton import launch
from lightning_nvfp4.recipe import QuantSpec

ROW, TENSOR, MX, S2F6 = QuantSpec(tensor_scale="row"), QuantSpec(), QuantSpec("mxfp8"), QuantSpec("s2f6")
RHT, TILES, FP8 = QuantSpec(hadamard=16), QuantSpec(block=(16, 16)), QuantSpec("fp8_block")
NV_BYTES, MX_BYTES, BF16_BYTES = 0.5 + 1 / 16, 1 + 1 / 32, 2


def median_ms(work: Callable[[], object]) -> float:
    """Return the median time on the device."""
    return do_bench(work, warmup=20, rep=100, return_mode="median")


def cases(x: torch.Tensor, seed: torch.Tensor) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return bytes per element and work of each kernel."""
    bf16 = torch.bfloat16
    amax = quantize(x, TENSOR).amax
    hadamard_amax = quantize(x, RHT, dim=0).amax

    def sr(spec: QuantSpec) -> QuantSpec:
        return replace(spec, rounding="stochastic")

    read, q, qm, qs = BF16_BYTES, quantize(x, ROW), quantize(x, MX), quantize(x, S2F6)
    found: dict[str, tuple[float, Callable[[], object]]] = {
        "amax, tensor": (read, lambda: launch.amax(x, TENSOR, 1)),
        "nvfp4 row: codes": (read + NV_BYTES, lambda: quantize(x, ROW)),
        "nvfp4 row: codes + values": (read + NV_BYTES + 2, lambda: quantize_with_values(x, ROW, dtype=bf16)),
        "nvfp4 row: values": (read + 2, lambda: quantize_values(x, ROW, dtype=bf16)),
        "nvfp4: codes": (read + NV_BYTES, lambda: quantize(x, TENSOR, amax=amax)),
        "nvfp4: values": (read + 2, lambda: quantize_values(x, TENSOR, amax=amax, dtype=bf16)),
        "nvfp4 16x16: codes": (read + NV_BYTES, lambda: quantize(x, TILES, amax=amax)),
        "nvfp4 SR: codes": (read + NV_BYTES, lambda: quantize(x, sr(TENSOR), amax=amax, seed=seed)),
        "nvfp4 SR: values": (read + 2, lambda: quantize_values(x, sr(TENSOR), amax=amax, seed=seed, dtype=bf16)),
        "nvfp4 columns: codes": (read + NV_BYTES, lambda: quantize(x, TENSOR, amax=amax, dim=0)),
        "nvfp4 columns SR: codes": (
            read + NV_BYTES,
            lambda: quantize(x, sr(TENSOR), amax=amax, dim=0, seed=seed),
        ),
        "nvfp4 columns: values": (read + 2, lambda: quantize_values(x, TENSOR, amax=amax, dim=0, dtype=bf16)),
        "nvfp4 columns RHT: values": (read + 2, lambda: quantize_values(x, RHT, amax=hadamard_amax, dim=0, dtype=bf16)),
        "nvfp4 columns RHT SR: values": (
            read + 2,
            lambda: quantize_values(x, sr(RHT), amax=hadamard_amax, dim=0, seed=seed, dtype=bf16),
        ),
        "mxfp8: codes": (read + MX_BYTES, lambda: quantize(x, MX)),
        "mxfp8: values": (read + 2, lambda: quantize_values(x, MX, dtype=bf16)),
        "mxfp8 columns: codes": (read + MX_BYTES, lambda: quantize(x, MX, dim=0)),
        "mxfp8 columns: values": (read + 2, lambda: quantize_values(x, MX, dim=0, dtype=bf16)),
        "mxfp8 SR: codes": (read + MX_BYTES, lambda: quantize(x, sr(MX), seed=seed)),
        "mxfp8 columns SR: codes": (read + MX_BYTES, lambda: quantize(x, sr(MX), dim=0, seed=seed)),
        "mxfp8 SR: values": (read + 2, lambda: quantize_values(x, sr(MX), seed=seed, dtype=bf16)),
        "mxfp8 columns SR: values": (read + 2, lambda: quantize_values(x, sr(MX), dim=0, seed=seed, dtype=bf16)),
        "mxfp8 both: values": (read + 4, lambda: quantize_values_twice(x, MX, MX, dtype=bf16)),
        "mxfp8 both SR: values": (read + 4, lambda: quantize_values_twice(x, sr(MX), sr(MX), seed=seed, dtype=bf16)),
        "fp8_block: values": (read + 2, lambda: quantize_values(x, FP8, dtype=bf16)),
        "s2f6 RHT-32: encode": (read + MX_BYTES, lambda: quantize(x, S2F6)),
        "s2f6 RHT-32: decode": (read + MX_BYTES, lambda: qs.dequantize(bf16)),
        "nvfp4: dequantize": (read + NV_BYTES, lambda: q.dequantize(bf16)),
        "mxfp8: dequantize": (read + MX_BYTES, lambda: qm.dequantize(bf16)),
        "nvfp4 to mxfp8 columns: values": (NV_BYTES + 2, lambda: requantize_values(q, MX, dim=0, dtype=bf16)),
    }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--csv", default="bench_kernels.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.columns, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    copy = 2 * BF16_BYTES * x.numel() / median_ms(lambda: out.copy_(x)) / 1e9
    rows = [["copy", "", f"{copy:.2f}", "100 %"]]
    for name, (per_element, work) in cases(x, torch.tensor(5, device="cuda")).items():
        ms = median_ms(work)
        rate = per_element * x.numel() / ms / 1e9
        rows.append([name, f"{ms:.3f}", f"{rate:.2f}", f"{rate / copy:.0%}"])
    title = f"Triton kernels, BF16 {options.rows} x {options.columns}, seed 0"
    show(title, ["kernel", "ms", "TB/s that must move", "of copy"], rows, "cuda", options.csv)


if __name__ == "__main__":
    main()

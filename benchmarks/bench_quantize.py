"""Time the quantizers: packed, values only, decoded, and the plain torch definition, for each format.

python benchmarks/bench_quantize.py [--device cpu] [--rows 2048] [--columns 128] [--csv bench_quantize.csv]
"""

from __future__ import annotations

import argparse

import torch
from timing import milliseconds, show

from lightning_nvfp4.ops import quantize, quantize_values
from lightning_nvfp4.ops.reference import quantize as definition
from lightning_nvfp4.recipe import QuantSpec

SPECS = {
    "nvfp4 1x16": QuantSpec("nvfp4"),
    "nvfp4 1x16, row scale": QuantSpec("nvfp4", tensor_scale="row"),
    "nvfp4 16x16": QuantSpec("nvfp4", block=(16, 16)),
    "nvfp4 SR": QuantSpec("nvfp4", rounding="stochastic"),
    "nvfp4 RHT-16 SR": QuantSpec("nvfp4", rounding="stochastic", hadamard=16),
    "mxfp8": QuantSpec("mxfp8"),
    "mxfp8 SR": QuantSpec("mxfp8", rounding="stochastic"),
    "s2f6 RHT-32": QuantSpec("s2f6"),
    "fp8_block 1x128": QuantSpec("fp8_block"),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--csv", default="bench_quantize.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.columns, generator=generator).to(options.device)
    rows = []
    for name, spec in SPECS.items():
        packed = quantize(x, spec)
        works = (
            lambda spec=spec: quantize(x, spec),
            lambda spec=spec: quantize_values(x, spec),
            lambda spec=spec: quantize_values(x, spec, dim=0),
            lambda packed=packed: packed.unscaled_values(),
            lambda spec=spec: definition.quantize_packed(x, spec, 1, 0, None),
        )
        times = [milliseconds(work, options.device, options.repeats) for work in works]
        rows.append([name, *(f"{t:.2f}" for t in times), f"{times[-1] / times[0]:.1f}"])
    head = [
        "format",
        "quantize ms",
        "values ms",
        "values dim=0 ms",
        "decode ms",
        "definition ms",
        "definition / quantize",
    ]
    show(f"{options.rows} x {options.columns} FP32 elements", head, rows, options.device, options.csv)


if __name__ == "__main__":
    main()

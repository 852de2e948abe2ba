"""Time the emulated linear, forward and backward, against BF16, and against peers where they are installed.

    python benchmarks/bench_linear.py [--tokens 8192] [--inputs 4096] [--outputs 14336] [--csv bench_linear.csv]

Input and output gradient are BF16, our weights FP32 masters, `nn.Linear`'s BF16. "cached" finds the packed weight of
the optimizer step, as the later micro-batches of an accumulation do.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from timing import show
from triton.testing import do_bench

from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.recipe import PRESETS


def forward_backward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> Any:
    """Return work that runs both passes and drops the gradients."""

    def work() -> None:
        x.grad = None
        function(x).backward(dy)

    return work


def ours(preset: str, role: str, w: torch.Tensor, cached: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the linear of a preset; without the cache every call begins an optimizer step."""
    context = NumericsContext()
    numerics = LayerNumerics(PRESETS[preset].gemms[role], context, 0, "auto")
    step = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal step
        step += not cached
        context.begin(0, 0, step, 0)
        w.grad = None
        return grouped_linear(x, w.unsqueeze(0), None, (len(x),), numerics, torch.bfloat16)

    return function


def peers(w: torch.Tensor, inputs: int, outputs: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return linears of other packages that are installed."""
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    if importlib.util.find_spec("torchao"):
        from torchao.prototype.mx_formats.config import ScaleCalculationMode  # pyright: ignore
        from torchao.prototype.mx_formats.mx_linear import _to_mxfp8_then_scaled_mm  # pyright: ignore
        from torchao.quantization.quantize_.common import KernelPreference  # pyright: ignore

        how = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL
        found["torchao MXFP8, emulated"] = lambda x: _to_mxfp8_then_scaled_mm(x, w, *how)
    if importlib.util.find_spec("mx"):
        from mx import Linear, finalize_mx_specs  # pyright: ignore

        formats = {"w_elem_format": "fp8_e4m3", "a_elem_format": "fp8_e4m3", "block_size": 32, "scale_bits": 8}
        specs = finalize_mx_specs({**formats, "bfloat": 16, "custom_cuda": False})
        emulated = Linear(inputs, outputs, bias=False, mx_specs=specs).to("cuda", torch.bfloat16)
        found["microxcaling MXFP8, emulated"] = emulated
    if importlib.util.find_spec("transformer_engine"):
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.common.recipe import Float8BlockScaling  # pyright: ignore[reportMissingImports]

        layer = te.Linear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda")

        def native(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=Float8BlockScaling()):
                return layer(x)

        found["Transformer Engine FP8 block scaling, native"] = native
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=14336)
    parser.add_argument("--csv", default="bench_linear.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(options.tokens, options.inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(options.tokens, options.outputs, device="cuda", dtype=torch.bfloat16)
    master = (0.02 * torch.randn(options.outputs, options.inputs, device="cuda")).requires_grad_()
    low = master.detach().bfloat16().requires_grad_()
    arms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "nn.Linear BF16": lambda x: torch.nn.functional.linear(x, low),
        "bf16-gemm": ours("bf16-gemm", "mlp", master, False),
        "nvfp4-hybrid, cached": ours("nvfp4-hybrid", "mlp", master, True),
        "nvfp4-hybrid": ours("nvfp4-hybrid", "mlp", master, False),
        "mxfp8": ours("mxfp8", "linear", master, False),
        "fp8": ours("fp8", "linear", master, False),
        "nvfp4": ours("nvfp4", "linear", master, False),
        **peers(low, options.inputs, options.outputs),
    }
    flops = 6 * options.tokens * options.inputs * options.outputs
    rows: list[list[str]] = []
    base = 0.0
    for name, function in arms.items():
        try:
            ms = do_bench(forward_backward(function, x, dy), warmup=50, rep=200, return_mode="median")
        except Exception as error:  # a peer that cannot run here is a row, not the end
            rows.append([name, type(error).__name__, "", ""])
            continue
        base = base or ms
        rows.append([name, f"{ms:.3f}", f"{flops / ms / 1e9:.0f}", f"{ms / base:.2f}"])
    title = f"Linear fwd + bwd, {options.tokens} x {options.inputs} x {options.outputs}, seed 0"
    show(title, ["arm", "ms", "TFLOP/s", "x nn.Linear"], rows, "cuda", options.csv)


if __name__ == "__main__":
    main()

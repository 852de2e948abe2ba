"""Time the grouped GEMMs of one expert projection, forward and backward, against BF16 `torch._grouped_mm`.

    python benchmarks/bench_moe.py [--experts 16] [--tokens 16384] [--inputs 2048] [--outputs 2048] [--csv FILE]

"launched" includes the time in which Python keeps the device waiting, "CUDA graph" does not. Tokens are spread evenly;
counts stay on the device. "cached" finds the packed weights of the optimizer step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from bench_linear import forward_backward
from timing import show
from triton.testing import do_bench, do_bench_cudagraph

from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.ops import Groups
from lightning_nvfp4.recipe import PRESETS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=2048)
    parser.add_argument("--csv", default="bench_moe.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(options.tokens, options.inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(options.tokens, options.outputs, device="cuda", dtype=torch.bfloat16)
    shape = (options.experts, options.outputs, options.inputs)
    master = (0.02 * torch.randn(*shape, device="cuda")).requires_grad_()
    low = master.detach().bfloat16().requires_grad_()
    each = options.tokens // options.experts
    offsets = torch.arange(0, options.tokens + 1, each, dtype=torch.int32, device="cuda")
    groups = Groups(options.experts, offsets=offsets)

    def ours(preset: str, cached: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        context = NumericsContext()
        numerics = LayerNumerics(PRESETS[preset].gemms.get("experts", PRESETS[preset].gemms["linear"]), context, 0)
        step = 0

        def function(x: torch.Tensor) -> torch.Tensor:
            nonlocal step
            step += not cached
            context.begin(0, 0, step, 0)
            master.grad = None
            return grouped_linear(x, master, None, groups, numerics, torch.bfloat16)

        return function

    arms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "torch._grouped_mm BF16": lambda x: torch._grouped_mm(x, low.transpose(1, 2), offs=offsets[1:]),
        "bf16-gemm": ours("bf16-gemm", False),
        "nvfp4-hybrid, cached": ours("nvfp4-hybrid", True),
        "nvfp4-hybrid": ours("nvfp4-hybrid", False),
        "mxfp8": ours("mxfp8", False),
        "fp8": ours("fp8", False),
        "nvfp4": ours("nvfp4", False),
    }
    rows: list[list[str]] = []
    base = graph_base = 0.0
    for name, function in arms.items():
        work = forward_backward(function, x, dy)
        ms = do_bench(work, warmup=50, rep=200, return_mode="median")
        graph = do_bench_cudagraph(work, rep=100, return_mode="median")
        base, graph_base = base or ms, graph_base or graph
        rows.append([name, f"{ms:.3f}", f"{ms / base:.2f}", f"{graph:.3f}", f"{graph / graph_base:.2f}"])
    title = f"Experts fwd + bwd, {options.experts} x {options.tokens} x {options.inputs} x {options.outputs}, seed 0"
    show(title, ["arm", "launched ms", "x _grouped_mm", "CUDA graph ms", "x _grouped_mm"], rows, "cuda", options.csv)


if __name__ == "__main__":
    main()

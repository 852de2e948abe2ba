"""One layer, forward and backward, on any backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.ops.te.layers import Layers
from lightning_nvfp4.recipe import GemmRecipe

# Rows of each expert, outputs, inputs, and whether there is a bias.
CASES = [
    ((256,), 384, 256, False),
    ((256,), 384, 256, True),
    ((100,), 256, 128, True),
    ((1,), 128, 128, False),
    ((128, 0, 256), 384, 256, False),
    ((128, 0, 256), 384, 256, True),
    ((0, 0, 0, 128), 128, 128, False),
]


def run(
    gemm: GemmRecipe,
    backend: str,
    counts: tuple[int, ...],
    n: int,
    k: int,
    bias: bool,
    build: Any = None,
    device: str = "cuda",
) -> list[Tensor]:
    """Return the output and the gradients of input, weight and bias of a layer with seeded data, on the CPU."""
    context = NumericsContext(step_seed=3)
    if build is not None:
        context.te_layers = Layers(build)
    numerics = LayerNumerics(gemm, context, 1, "auto" if backend == "te" else backend, native=backend == "te")
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), k), (len(counts), n, k), *([(len(counts), n)] if bias else [])]
    leaves = [torch.randn(*shape, generator=g).to(device) for shape in shapes]
    leaves[0] = leaves[0].bfloat16()
    for leaf in leaves:
        leaf.requires_grad_()
    dy = torch.randn(sum(counts), n, generator=g).to(device, torch.bfloat16)
    y = grouped_linear(leaves[0], leaves[1], leaves[2] if bias else None, counts, numerics, torch.bfloat16)
    y.backward(dy)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == len(leaves)
    return [t.detach().cpu() for t in (y, *gradients)]

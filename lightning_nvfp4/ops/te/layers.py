"""TE's linear layers on the model's own parameters.

TE's modules are made on the meta device, once for each layer, for the quantizers they hold; a call lends them the
parameters. They are no submodules of the model: nothing of them is in its state dict.

Shapes: R rows (tokens, sorted by expert), E experts, N outputs, K inputs; a plain linear is the case E = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_nvfp4.ops.groups import Groups
from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.ops.te.main_grad import stand_ins
from lightning_nvfp4.ops.te.plan import ROWS
from lightning_nvfp4.recipe import GemmRecipe


@dataclass(frozen=True)
class Layer:
    """A TE module without parameters of its own, with its recipe.

    Attributes:
        module: ``te.Linear`` or ``te.GroupedLinear``.
        recipe: TE's.
        gradient: what its quantizers know of the gradient.
        fused: the module takes TE's grouped kernels, which read the counts on the device.
    """

    module: Any
    recipe: Any
    gradient: Gradient
    fused: bool


class Layers:
    """The TE modules of a model, made when they are first called.

    Args:
        build: makes the quantizers in the place of TE's; see `recipes.recipe_of`.
    """

    def __init__(self, build: Any = None) -> None:
        self.build = build
        self._made: dict[Any, Layer] = {}

    def __reduce__(self) -> Any:
        """Copy and pickle without the modules, which are made again."""
        return Layers, (self.build,)

    def of(self, index: int, gemm: GemmRecipe, shape: tuple[int, ...], bias: bool) -> Layer:
        """Return the module of layer `index` with weights of a shape (E, N, K), made once."""
        key = (index, gemm, tuple(shape), bias)
        if key not in self._made:
            self._made[key] = _make(f"layer{index}", gemm, shape, bias, self.build)
        return self._made[key]


def _make(name: str, gemm: GemmRecipe, shape: tuple[int, ...], bias: bool, build: Any) -> Layer:
    import transformer_engine.pytorch as te

    from lightning_nvfp4.ops.te import recipes

    experts, outputs, inputs = shape
    gradient = Gradient()
    recipe = recipes.recipe_of(gemm, gradient, build)
    arguments: dict[str, Any] = {
        "bias": bias,
        "params_dtype": torch.float32,
        "device": "meta",
        "fuse_wgrad_accumulation": True,
        "name": name,
    }
    if experts == 1:
        return Layer(te.Linear(inputs, outputs, **arguments), recipe, gradient, False)
    fused = recipes.fused_grouped(recipe)
    if fused:
        arguments["use_grouped_tensor"] = True
    module = te.GroupedLinear(experts, inputs, outputs, **arguments)
    if not bias:  # placeholders that are no parameters, but travel with them
        for expert in range(experts):
            setattr(module, f"bias{expert}", torch.empty(0, device="cuda"))
    return Layer(module, recipe, gradient, fused)


@torch.compiler.disable
def grouped_linear(
    x_RK: Tensor,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    groups: Groups,
    layer: Layer,
    seed: int | Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return ``x @ w[e]^T + bias[e]`` for the rows of each expert, computed by TE.

    Args:
        x_RK: activations on CUDA, rounded to BF16 first; at least one row.
        w_ENK: weights in FP32 (or BF16), read by TE's quantizers. Their gradient is accumulated in FP32.
        bias_EN: rounded to BF16 and added in the GEMM's epilogue.
        groups: rows of each expert, multiples of `ROWS` if there is more than one.
        layer: of `Layers.of`.
        seed: of the gradient's stochastic rounding.
        out_dtype: of the result, which TE computes in BF16.
    """
    import transformer_engine.pytorch as te

    rows = len(x_RK)
    x_RK = x_RK.to(torch.bfloat16)
    weights = stand_ins(w_ENK)
    padding = -rows % ROWS if len(weights) == 1 else 0
    if padding:  # a padding of nothing, and a slice of all, would be copies
        x_RK = torch.nn.functional.pad(x_RK, (0, 0, 0, padding))
    if len(weights) == 1:
        parameters = {"weight": weights[0]}
        splits = ()
        if bias_EN is not None:
            parameters["bias"] = bias_EN[0]
    else:
        parameters = {f"weight{e}": weight for e, weight in enumerate(weights)}
        splits = (_splits(groups, layer.fused, x_RK.device),)
        if bias_EN is not None:
            parameters |= {f"bias{e}": bias for e, bias in enumerate(bias_EN.unbind(0))}
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), te.autocast(enabled=True, recipe=layer.recipe):
        y_RN = torch.func.functional_call(layer.module, parameters, (x_RK, *splits), tie_weights=False)
    y_RN = layer.gradient.announced(y_RN, seed)
    return (y_RN[:rows] if padding else y_RN).to(out_dtype)


def _splits(groups: Groups, fused: bool, device: torch.device) -> Tensor:
    if fused:
        return groups.on_device(device).diff().to(torch.int64)
    return torch.tensor(groups.on_host(), dtype=torch.int64)

"""`BlockScaledLinear`: an `nn.Linear` whose GEMMs run in a recipe's numerics, holding the same Parameter objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_nvfp4.capability import slow_bf16
from lightning_nvfp4.nn.context import LayerNumerics
from lightning_nvfp4.nn.function import grouped_linear


class ConvertedModule(nn.Module):
    """What conversion adds to a module's class. Such classes are made on the way, so pickle needs to be told how."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the mixin and the class it was added to, which can both be imported."""
        make, arguments, *state = super().__reduce_ex__(protocol)
        kind = type(self)
        if arguments != (kind,) or _CLASSES.get(kind.__bases__) is not kind:
            return make, arguments, *state
        return _new, kind.__bases__, *state


_CLASSES: dict[tuple[type, ...], type] = {}


def converted_class(mixin: type[ConvertedModule], original: type) -> type:
    """Return the class that adds `mixin` to `original`."""
    if original is nn.Linear and mixin is BlockScaledLinear:
        return mixin
    key = (mixin, original)
    if key not in _CLASSES:
        _CLASSES[key] = type(f"{mixin.__name__}_{original.__name__}", key, {})
    return _CLASSES[key]


def _new(mixin: type[ConvertedModule], original: type) -> nn.Module:
    kind: Any = converted_class(mixin, original)
    return kind.__new__(kind)


class BlockScaledLinear(ConvertedModule, nn.Linear):
    """A linear layer in block-scaled numerics.

    Instances are made by `lightning_nvfp4.nn.convert.convert`, which changes the class of an existing layer: its
    parameters, hooks, state-dict keys, dtype and device stay what they were.

    ``y = x @ w^T + b`` with x (..., K), w (N, K), b (N,); quantizers as in `GemmRecipe`. The result has the autocast
    dtype where autocast is on, else x's. A layer kept in high precision (``numerics.kept``) computes as `nn.Linear`
    does, except that a CPU without BF16 instructions, where that is ten times as slow, multiplies the BF16 operands in
    FP32.
    """

    block_scaled_numerics: LayerNumerics

    def forward(self, input: Tensor) -> Tensor:
        """Return the (..., N) product for `input` (..., K)."""
        numerics = self.block_scaled_numerics
        if numerics.kept and (not torch.is_autocast_enabled("cpu") or not slow_bf16(input.device.type)):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.unsqueeze(0)
        flat = input.reshape(-1, input.shape[-1])
        y = grouped_linear(flat, self.weight.unsqueeze(0), bias, (flat.shape[0],), numerics, compute_dtype(input))
        # No view to autograd: FSDP2 warns of views that leave a module.
        return torch.ops.aten._unsafe_view(y, (*input.shape[:-1], y.shape[-1]))

    forward.block_scaled = True  # type: ignore[attr-defined]


class Fp32Router(ConvertedModule):
    """Mixin for the router of a mixture of experts: logits computed and stored in FP32, outside autocast.

    BF16 logits move the chosen experts of some percent of the tokens, so the router is never left to autocast.
    """

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        """Run the router's own forward in FP32."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return super().forward(hidden_states.float(), *args, **kwargs)

    forward.block_scaled = True  # type: ignore[attr-defined]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a GEMM's result: the autocast dtype where autocast is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

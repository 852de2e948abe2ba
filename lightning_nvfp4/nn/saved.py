"""Quantized tensors through autograd's saved tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_nvfp4.ops import QuantizedTensor


def save(ctx: Any, *values: QuantizedTensor | Tensor | None) -> None:
    """Hand every tensor to autograd, so that saved-tensor hooks (recompute, offload) see packed codes and scales."""
    layout, tensors = [], []
    for value in values:
        if isinstance(value, QuantizedTensor):
            parts = value.tensors()
            layout.append((value.meta, len(parts)))
            tensors.extend(parts)
        else:
            layout.append((None, 1))
            tensors.append(value)
    ctx.layout = layout
    ctx.save_for_backward(*tensors)


def load(ctx: Any) -> list[Any]:
    """Return what `save` was given: quantized tensors, tensors and ``None``, in its order."""
    saved, values, start = ctx.saved_tensors, [], 0
    for meta, count in ctx.layout:
        parts = saved[start : start + count]
        values.append(parts[0] if meta is None else QuantizedTensor.from_tensors(meta, parts))
        start += count
    return values

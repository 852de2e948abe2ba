"""BF16 autocast as the presets mean it, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from lightning_nvfp4.capability import slow_bf16

_attention = functional.scaled_dot_product_attention


@contextmanager
def bf16_autocast(device_type: str) -> Iterator[None]:
    """Run under BF16 autocast; attention on a CPU without BF16 instructions runs in FP32 on the BF16 operands.

    There a BF16 attention takes three times as long, and its products and softmax are no more exact.
    """
    with (
        torch.autocast(device_type, dtype=torch.bfloat16, cache_enabled=False),
        attention_of_autocast(device_type),
        _layers_by_their_forward(),
    ):
        yield


@contextmanager
def _layers_by_their_forward() -> Iterator[None]:
    """Switch off the path on which `nn.TransformerEncoder` in evaluation reads its linears' weights itself."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def attention_of_autocast(device_type: str) -> Iterator[None]:
    """Make the choice of attention alone: for the backward pass, where recompute restores autocast by itself.

    The function is replaced while this is open. A torch function mode would be cleaner, but none is active where
    autograd runs recomputed layers.
    """
    if not slow_bf16(device_type):
        yield
        return
    previous = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _fp32_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = previous


def _fp32_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Under autocast, multiply the BF16-rounded operands in FP32; else leave attention as it is."""
    if not torch.is_autocast_enabled("cpu"):
        return _attention(*args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return _attention(*map(_operand, args), **{k: _operand(v) for k, v in kwargs.items()}).to(torch.bfloat16)


def _operand(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16).to(torch.float32) if floating else value

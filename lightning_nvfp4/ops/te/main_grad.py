"""Weight gradients in FP32 from TE's GEMMs, as ordinary gradients of the parameters.

TE rounds a weight's gradient to BF16 unless it may write into a buffer ``main_grad`` of the weight's, and then returns
no gradient at all. Here TE is handed stand-ins for the weights, and the node behind them hands on what was written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def stand_ins(w_ENK: Tensor) -> tuple[Tensor, ...]:
    """Return E tensors (N, K) over the weight's memory; what TE writes for them becomes the gradient of `w_ENK`."""
    if not w_ENK.requires_grad or not torch.is_grad_enabled():
        return w_ENK.detach().unbind(0)
    buffers = _Buffers(w_ENK)
    made = _StandIns.apply(w_ENK, buffers)
    for expert, weight in enumerate(made):
        # TE asks for the buffer in its backward when a weight has these (the protocol of Megatron's FSDP), and holds
        # what it asks, which here holds the weight: TE itself keeps only a weak reference to it.
        weight.get_main_grad = functools.partial(buffers.of, expert, weight)
        weight.overwrite_main_grad = True
        weight.__fsdp_param__ = True
    buffers.held = made
    return made


class _Buffers:
    """FP32 gradients (E, N, K), allocated when the first is asked for."""

    def __init__(self, w_ENK: Tensor) -> None:
        self.shape, self.device = w_ENK.shape, w_ENK.device
        self.gradient: Tensor | None = None
        self.held: tuple[Tensor, ...] = ()

    def of(self, expert: int, weight: Tensor) -> Tensor:
        if self.gradient is None:
            self.gradient = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        return self.gradient[expert]

    def take(self) -> Tensor | None:
        """Return the gradient, and let go of all."""
        for weight in self.held:
            vars(weight).clear()
        gradient, self.gradient, self.held = self.gradient, None, ()
        return gradient


class _StandIns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w_ENK: Tensor, buffers: _Buffers) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.buffers, ctx.dtype = buffers, w_ENK.dtype
        return w_ENK.detach().unbind(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None]:
        gradient = ctx.buffers.take()
        returned = [g for g in grad_outputs if g is not None]
        if returned:  # a TE that ignores the buffers returns its gradients
            raise RuntimeError(
                "Transformer Engine returned a weight gradient where it was to write one into main_grad."
            )
        return (None if gradient is None else gradient.to(ctx.dtype)), None

"""The output's gradient of a layer on its way into TE's backward, with the seed that it is rounded with.

TE quantizes the gradient expert by expert, and knows of no seed. The random bits of an element are a function of the
seed and of its index in the whole gradient, so the whole is quantized at once, and each expert's quantizer takes its
rows of it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.select import quantize
from lightning_nvfp4.recipe import QuantSpec


class Gradient:
    """What the quantizers of one layer share.

    Attributes:
        seed: of stochastic rounding, for the backward that runs.
    """

    def __init__(self) -> None:
        self.seed: int | Tensor = 0
        self._whole: weakref.ref[Tensor] | None = None

    def announced(self, y: Tensor, seed: int | Tensor) -> Tensor:
        """Return y; in its backward the gradient and `seed` are made known here before TE's backward begins."""
        return _Announce.apply(y, self, seed) if y.requires_grad else y

    def begin(self, dy_RN: Tensor, seed: int | Tensor) -> None:
        """Make a gradient known for as long as it lives."""
        self.seed, self._whole = seed, weakref.ref(dy_RN)

    def quantized(self, part: Tensor, spec: QuantSpec, dim: int) -> tuple[Tensor, Tensor]:
        """Return codes and block scales of rows of the gradient, in the order of dims of the gradient.

        Args:
            part: (rows, N), a view of the gradient whose backward runs, or any other matrix.
            spec: without tensor scale, blocks of one row.
            dim: the quantized dim, 0 or 1. Along the rows the part begins and ends with a block.

        Returns:
            uint8 (rows, N) codes; uint8 (rows, blocks) or (blocks, N) scales.
        """
        whole = self._whole() if self._whole is not None else None
        start = None if whole is None else _first_row(whole, part)
        if whole is None or start is None:
            return _planes(quantize(part, spec, dim=dim, seed=self.seed), dim)
        name = f"block_scaled_plane_{dim}"  # kept on the gradient, to go with it
        codes, scales = getattr(whole, name, None) or _planes(quantize(whole, spec, dim=dim, seed=self.seed), dim)
        setattr(whole, name, (codes, scales))
        length = spec.block[1] if spec.block and dim == 0 else 1
        return codes[start : start + len(part)], scales[start // length : -(-(start + len(part)) // length)]


def _planes(q: QuantizedTensor, dim: int) -> tuple[Tensor, Tensor]:
    return (q.codes, q.block_scale) if dim else (q.codes.t().contiguous(), q.block_scale.t().contiguous())


def _first_row(whole: Tensor, part: Tensor) -> int | None:
    """Return where `part` begins in `whole`, ``None`` if it is no run of its rows."""
    if part.dtype != whole.dtype or part.ndim != 2 or part.shape[1] != whole.shape[1] or not part.is_contiguous():
        return None
    if not len(part):
        return 0
    row, rest = divmod(part.data_ptr() - whole.data_ptr(), whole.shape[1] * whole.element_size())
    return row if not rest and 0 <= row <= len(whole) - len(part) else None


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Gradient, seed: int | Tensor) -> Tensor:
        ctx.gradient, ctx.seed = gradient, seed
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        dy_RN = grad_outputs[0].to(torch.bfloat16).contiguous()
        ctx.gradient.begin(dy_RN, ctx.seed)
        return dy_RN, None, None

"""From tensors to GEMM operands: values without tensor scale, and the tensor scale for the FP32 epilogue.

Shapes: R rows (tokens, sorted by expert), E experts, N and K the weight's dims, C blocks along the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.ops import (
    Groups,
    QuantizedTensor,
    finite_amax,
    hadamard_transform,
    quantize,
    quantize_values,
    quantize_with_values,
)
from lightning_nvfp4.recipe import QuantSpec


@dataclass(frozen=True)
class Operand:
    """One GEMM operand, in the layout of the tensor it comes from.

    Attributes:
        values: (rows, length) or (E, rows, length); every value is exact in BF16 (design of the formats), the dtype is
            `operand_dtype`.
        scale: float32 decode tensor scale: of activations and gradients along features () or (R, 1); of weights
            (1 or E, 1 or N); along tokens (1 or E, 1 or N). ``None`` is 1.
    """

    values: Tensor
    scale: Tensor | None = None

    @staticmethod
    def bf16(x: Tensor) -> Operand:
        """Round a tensor to BF16."""
        return Operand(x.to(torch.bfloat16).to(operand_dtype(x)))


def operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that holds GEMM operands on x's device: BF16 for tensor cores, FP32 on a CPU."""
    return torch.bfloat16 if x.is_cuda else torch.float32


class Tokens(NamedTuple):
    """Arguments of `quantize` for activations or gradients (R, K) whose rows are sorted by expert.

    Build with `along_features` or `along_tokens`; `packed` and `operand` then quantize.
    """

    x: Tensor
    spec: QuantSpec
    dim: int
    amax: Tensor | None
    groups: Groups
    seed: int | Tensor
    backend: str

    def packed(self) -> QuantizedTensor:
        """Quantize to packed codes, to be saved."""
        return quantize(self.x, self.spec, dim=self.dim, seed=self.seed, amax=self.amax, backend=self.backend)

    def operand(self) -> Operand:
        """Quantize to values, to be multiplied at once."""
        values, scale = quantize_values(
            self.x,
            self.spec,
            dim=self.dim,
            seed=self.seed,
            amax=self.amax,
            backend=self.backend,
            dtype=operand_dtype(self.x),
        )
        return self._scaled(values, scale)

    def both(self) -> tuple[QuantizedTensor, Operand]:
        """Quantize to codes and to values."""
        q, values = quantize_with_values(
            self.x,
            self.spec,
            dim=self.dim,
            seed=self.seed,
            amax=self.amax,
            backend=self.backend,
            dtype=operand_dtype(self.x),
        )
        return q, self._scaled(values, q.tensor_scale)

    def _scaled(self, values: Tensor, scale: Tensor | None) -> Operand:
        return Operand(values, scale if self.dim == -1 else per_expert_scales(scale, self.spec, self.groups))


def along_features(x_RK: Tensor, spec: QuantSpec, seed: int | Tensor, groups: Groups, backend: str) -> Tokens:
    """Quantize `x_RK` along K.

    A ``tensor`` scale is one per expert, as in TE's grouped linear; it is expanded to one per row.
    """
    amax = None
    if spec.tensor_scale == "tensor" and groups.num > 1:
        x_RK, spec = _transformed(x_RK, spec, -1)
        expert = groups.expert_of(torch.arange(len(x_RK), device=x_RK.device))
        amax = _amax_of_experts(finite_amax(x_RK, -1), expert, groups)[expert].unsqueeze(-1)
    return Tokens(x_RK, spec, -1, amax, groups, seed, backend)


def along_tokens(x_RK: Tensor, spec: QuantSpec, seed: int | Tensor, groups: Groups, backend: str) -> Tokens:
    """Quantize `x_RK` along its rows, the tokens of each expert apart: blocks lie inside one expert.

    Each expert's number of rows is a multiple of the block, or there is one expert only.
    """
    if spec.tensor_scale == "none" or groups.num == 1:
        return Tokens(x_RK, spec, 0, None, groups, seed, backend)
    x_RK, spec = _transformed(x_RK, spec, 0)
    assert spec.block is not None
    expert = groups.expert_of(torch.arange(len(x_RK), device=x_RK.device))
    per_row = finite_amax(x_RK, -1) if spec.tensor_scale == "tensor" else finite_amax(x_RK, ())
    amax = _amax_of_experts(per_row, expert, groups)[expert[:: spec.block[1]]]
    return Tokens(x_RK, spec, 0, amax.unsqueeze(0) if amax.ndim == 1 else amax.T, groups, seed, backend)


def per_expert_scales(scale: Tensor | None, spec: QuantSpec, groups: Groups) -> Tensor | None:
    """Turn the scales of an `along_tokens` operand, one per block (1 or N, C), into those of experts (E, 1 or N)."""
    if scale is None:
        return None
    if groups.num == 1:
        return scale.reshape(1, -1)
    assert spec.block is not None
    if not scale.shape[1]:
        return scale.new_ones(groups.num, 1)
    # An expert without tokens owns no block: its product is zero under any scale.
    first = groups.on_device(scale.device)[:-1].long() // spec.block[1]
    return scale[:, first.clamp(max=scale.shape[1] - 1)].T


def _amax_of_experts(per_row: Tensor, expert: Tensor, groups: Groups) -> Tensor:
    """Return the largest entry of each expert's rows, (E, ...) for `per_row` (R, ...); 0 for an expert without rows."""
    out = per_row.new_zeros(groups.num, *per_row.shape[1:])
    index = expert.view(-1, *[1] * (per_row.ndim - 1)).expand_as(per_row)
    return out.scatter_reduce(0, index, per_row, "amax")


def _transformed(x: Tensor, spec: QuantSpec, dim: int) -> tuple[Tensor, QuantSpec]:
    """Apply the Hadamard transform first: the scale of a part of the tensor is taken after it."""
    if not spec.hadamard:
        return x, spec
    return hadamard_transform(x, spec, dim=dim), replace(spec, hadamard=0, hadamard_signs=None)

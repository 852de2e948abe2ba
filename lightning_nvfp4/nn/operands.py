"""From a tensor to a GEMM operand: values without tensor scale, and the tensor scale for the FP32 epilogue.

Shapes: R rows (tokens, sorted by expert), E experts, N and K the weight's dims, B blocks along the contracted dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.ops import QuantizedTensor, finite_amax, hadamard_transform, quantize, quantize_values
from lightning_nvfp4.recipe import QuantSpec


@dataclass(frozen=True)
class Operand:
    """One GEMM operand, contracted dim last.

    Attributes:
        values: float32 (rows, length) or (E, rows, length); every value is exact in BF16 (design of the formats).
        scale: float32 decode tensor scale that broadcasts against rows; (rows or 1, E) for an operand contracted over
            the tokens of E experts; ``None`` is 1.
    """

    values: Tensor
    scale: Tensor | None = None

    @staticmethod
    def of(q: QuantizedTensor) -> Operand:
        """Decode a quantized tensor."""
        return Operand(q.unscaled_values(), q.tensor_scale)

    @staticmethod
    def bf16(x: Tensor) -> Operand:
        """Round a tensor to BF16."""
        return Operand(x.to(torch.bfloat16).to(torch.float32))


class Tokens(NamedTuple):
    """Arguments of `quantize` for activations or gradients (R, K) whose rows are sorted by expert.

    Build with `along_features` or `along_tokens`; `packed` and `operand` then quantize.
    """

    x: Tensor
    spec: QuantSpec
    dim: int
    amax: Tensor | None
    counts: Sequence[int]
    seed: int
    backend: str

    def packed(self) -> QuantizedTensor:
        """Quantize to packed codes, to be saved."""
        return quantize(self.x, self.spec, dim=self.dim, seed=self.seed, amax=self.amax, backend=self.backend)

    def operand(self) -> Operand:
        """Quantize to values, to be multiplied at once."""
        values, scale = quantize_values(
            self.x, self.spec, dim=self.dim, seed=self.seed, amax=self.amax, backend=self.backend
        )
        return Operand(values, scale)


def along_features(x_RK: Tensor, spec: QuantSpec, seed: int, counts: Sequence[int], backend: str) -> Tokens:
    """Quantize `x_RK` along K.

    A ``tensor`` scale is one per expert, as in TE's grouped linear; it is expanded to one per row.
    """
    amax = None
    if spec.tensor_scale == "tensor" and len(counts) > 1:
        x_RK, spec = _transformed(x_RK, spec)
        per_expert = torch.stack([finite_amax(part) for part in x_RK.split(list(counts))])
        amax = _expand(per_expert, counts).unsqueeze(-1)
    return Tokens(x_RK, spec, -1, amax, counts, seed, backend)


def along_tokens(x_RK: Tensor, spec: QuantSpec, seed: int, counts: Sequence[int], backend: str) -> Tokens:
    """Quantize `x_RK` along its rows, the tokens of each expert apart: codes of (K, R), blocks inside one expert.

    Each entry of `counts` is a multiple of the block, or there is one entry only.
    """
    if spec.tensor_scale == "none" or len(counts) == 1:
        return Tokens(x_RK, spec, 0, None, counts, seed, backend)
    x_KR, spec = _transformed(x_RK.T, spec)
    dims = (0, 1) if spec.tensor_scale == "tensor" else 1
    per_expert = torch.stack([finite_amax(part, dims).view(-1) for part in x_KR.split(list(counts), dim=1)])
    amax = _expand(per_expert, _blocks(counts, spec)).T
    return Tokens(x_KR, spec, -1, amax, counts, seed, backend)


def per_expert_scales(operand: Operand, spec: QuantSpec, counts: Sequence[int]) -> Operand:
    """Turn the scales of an `along_tokens` operand, one per block, into one column for each expert."""
    scale = operand.scale
    if scale is None:
        return operand
    if len(counts) == 1:
        return Operand(operand.values, scale.reshape(-1, 1))
    blocks = _blocks(counts, spec)
    first = [sum(blocks[:e]) for e in range(len(blocks))]
    last = scale.shape[1] - 1
    # An expert without tokens owns no block: its product is zero under any scale.
    columns = scale[:, [min(i, last) for i in first]] if last >= 0 else scale.new_ones(1, len(counts))
    return Operand(operand.values, columns)


def _blocks(counts: Sequence[int], spec: QuantSpec) -> list[int]:
    assert spec.block is not None
    return [-(-count // spec.block[1]) for count in counts]


def _transformed(x: Tensor, spec: QuantSpec) -> tuple[Tensor, QuantSpec]:
    """Apply the Hadamard transform first: the scale of a part of the tensor is taken after it."""
    if not spec.hadamard:
        return x, spec
    return hadamard_transform(x, spec), replace(spec, hadamard=0, hadamard_signs=None)


def _expand(per_expert: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(per_expert, torch.tensor(list(counts), device=per_expert.device), dim=0)

"""From a tensor to a GEMM operand: values without tensor scale, and the tensor scale for the FP32 epilogue.

Shapes: R rows (tokens, sorted by expert), E experts, N and K the weight's dims, B blocks along the contracted dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_nvfp4.ops import QuantizedTensor, finite_amax, quantize
from lightning_nvfp4.ops.reference.hadamard import transform
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


def quantize_tokens(x_RK: Tensor, spec: QuantSpec, seed: int, counts: Sequence[int], backend: str) -> QuantizedTensor:
    """Quantize `x_RK` (rows sorted by expert) along K.

    A ``tensor`` scale is one per expert, as in TE's grouped linear; it is expanded to one per row.
    """
    amax = None
    if spec.tensor_scale == "tensor" and len(counts) > 1:
        x_RK, spec = _transformed(x_RK, spec)
        per_expert = torch.stack([finite_amax(part) for part in x_RK.split(list(counts))])
        amax = _expand(per_expert, counts).unsqueeze(-1)
    return quantize(x_RK, spec, dim=-1, seed=seed, amax=amax, backend=backend)


def quantize_over_tokens(
    x_RK: Tensor, spec: QuantSpec, seed: int, counts: Sequence[int], backend: str
) -> QuantizedTensor:
    """Quantize `x_RK` along its rows, the tokens of each expert apart: codes of (K, R), blocks inside one expert.

    Each entry of `counts` is a multiple of the block, or there is one entry only.
    """
    if spec.tensor_scale == "none" or len(counts) == 1:
        return quantize(x_RK, spec, dim=0, seed=seed, backend=backend)
    x_KR, spec = _transformed(x_RK.T, spec)
    dims = (0, 1) if spec.tensor_scale == "tensor" else 1
    per_expert = torch.stack([finite_amax(part, dims).view(-1) for part in x_KR.split(list(counts), dim=1)])
    amax = _expand(per_expert, _blocks(counts, spec)).T
    return quantize(x_KR, spec, dim=-1, seed=seed, amax=amax, backend=backend)


def over_tokens(q: QuantizedTensor, counts: Sequence[int]) -> Operand:
    """Decode the result of `quantize_over_tokens`; the tensor scales become one column for each expert."""
    scale = q.tensor_scale
    if scale is None or len(counts) == 1:
        return Operand(q.unscaled_values(), None if scale is None else scale.reshape(-1, 1))
    blocks = _blocks(counts, q.spec)
    first = [sum(blocks[:e]) for e in range(len(blocks))]
    last = scale.shape[1] - 1
    # An expert without tokens owns no block: its product is zero under any scale.
    columns = scale[:, [min(i, last) for i in first]] if last >= 0 else scale.new_ones(1, len(counts))
    return Operand(q.unscaled_values(), columns)


def _blocks(counts: Sequence[int], spec: QuantSpec) -> list[int]:
    assert spec.block is not None
    return [-(-count // spec.block[1]) for count in counts]


def _transformed(x: Tensor, spec: QuantSpec) -> tuple[Tensor, QuantSpec]:
    """Apply the Hadamard transform first: the scale of a part of the tensor is taken after it."""
    if not spec.hadamard:
        return x, spec
    return transform(x.float(), spec), replace(spec, hadamard=0, hadamard_signs=None)


def _expand(per_expert: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(per_expert, torch.tensor(list(counts), device=per_expert.device), dim=0)

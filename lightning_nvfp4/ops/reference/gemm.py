"""The GEMM of quantized operands, emulated: exact products, FP32 accumulation, tensor scales in the epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.reference.hadamard import sign_vector


@dataclass(frozen=True)
class _Operand:
    """Values (rows, K) to multiply and what stays outside: a scale () or (rows, 1), and the transform's signs."""

    values: Tensor
    scale: Tensor | None
    signs: tuple[int, ...]


def matmul(a: QuantizedTensor | Tensor, b: QuantizedTensor | Tensor) -> Tensor:
    """Return a @ b^T contracted over the quantized dim.

    Args:
        a: (M, K) quantized along K (whichever dim that was), or a plain tensor of BF16 values (M, K).
        b: (N, K), likewise.

    Returns:
        float32 (M, N): (sum over K of unscaled values, in FP32) * s_a * s_b, multiplied in this order. The exponents of
        the tensor scales are set apart and multiplied in last, so that nothing overflows or vanishes on the way that
        does not in the result; bits are those of the plain products otherwise.

    On CUDA the operands are BF16: exact as `QuantizedTensor.unscaled_values` says.

    Raises:
        UserError: a tensor scale that varies along K, transforms that do not cancel, or lengths that differ.
    """
    left, right = _operand(a, "a"), _operand(b, "b")
    if left.signs != right.signs:
        raise UserError(
            f"matmul: a has a Hadamard transform of length {len(left.signs)} and b of {len(right.signs)} (or other "
            "signs), which does not cancel: quantize both with the same hadamard and hadamard_signs."
        )
    if left.values.shape[-1] != right.values.shape[-1]:
        raise UserError(
            f"matmul: a has contracted length {left.values.shape[-1]} and b {right.values.shape[-1]}: quantize both "
            "along the dim they share."
        )
    if left.values.is_cuda:
        product = torch.mm(left.values.to(torch.bfloat16), right.values.to(torch.bfloat16).t(), out_dtype=torch.float32)
    else:
        product = left.values.to(torch.float32) @ right.values.to(torch.float32).t()
    return apply_tensor_scales(product, left.scale, None if right.scale is None else right.scale.reshape(1, -1))


def apply_tensor_scales(product: Tensor, row: Tensor | None, column: Tensor | None) -> Tensor:
    """Return float32 product * row * column, with no overflow or underflow that the result does not have.

    A scale above one and one below it are multiplied first: their product lies between them. Two scales on one side of
    one follow each other: what leaves the range after the first is out of it after the second.

    Args:
        product: float32 (M, N).
        row: float32, broadcastable to (M, 1), or ``None``.
        column: float32, broadcastable to (M, N), or ``None``.
    """
    if row is None or column is None:
        scale = row if column is None else column
        return product if scale is None else product * scale
    across = (row >= 1) != (column >= 1)
    return product * torch.where(across, row * column, row) * torch.where(across, 1.0, column)


def _operand(x: QuantizedTensor | Tensor, name: str) -> _Operand:
    if isinstance(x, Tensor):
        _require_2d(x, name)
        return _Operand(x, None, ())
    if len(x.shape) != 2:
        raise UserError(f"matmul: {name} has shape {x.shape}; it takes 2D operands. Reshape, or loop over experts.")
    if x.tensor_scale is not None and x.tensor_scale.ndim and x.tensor_scale.shape[-1] != 1:
        raise UserError(
            f"matmul: the tensor scale of {name} has shape {tuple(x.tensor_scale.shape)} and varies along the "
            "contracted dim: multiply each segment apart."
        )
    return _Operand(x.unscaled_values(), x.tensor_scale, sign_vector(x.spec))


def _require_2d(x: Tensor, name: str) -> None:
    if x.ndim != 2:
        raise UserError(f"matmul: {name} has shape {tuple(x.shape)}; it takes 2D operands.")

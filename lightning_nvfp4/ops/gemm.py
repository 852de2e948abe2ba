"""The GEMM of quantized operands, emulated: exact products, FP32 accumulation, tensor scales in the epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops.backends import has_kernels, kernels
from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.epilogue import apply_tensor_scales
from lightning_nvfp4.ops.groups import Groups
from lightning_nvfp4.ops.reference import grouped
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
    y_MN = grouped.product(left.values, right.values.t())
    return apply_tensor_scales(y_MN, left.scale, None if right.scale is None else right.scale.reshape(1, -1))


def rows_matmul(
    a_RK: Tensor,
    b: Tensor,
    groups: Groups,
    *,
    transposed: bool,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    bias_EN: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Tensor:
    """Multiply the rows of each expert by its matrix: ``y[r] = a[r] @ b[e]^T`` (or ``a[r] @ b[e]``).

    Args:
        a_RK: GEMM operand; BF16 on CUDA, BF16 values on a CPU.
        b: (E, N, K) if `transposed`, else (E, K, N).
        groups: rows of each expert.
        transposed: whether b is contracted over its last dim.
        row_scale: float32 tensor scale of a, () or (R, 1).
        column_scale: float32 tensor scale of b, (1 or E, 1 or N).
        bias_EN: (E, N), added in float32.
        dtype: of the result, rounded once.
        backend: as `ops.quantize`.
    """
    if has_kernels(a_RK, backend):
        offsets = groups.on_device(a_RK.device)
        return kernels().rows(a_RK, b, offsets, transposed, row_scale, column_scale, bias_EN, dtype)
    return grouped.rows(a_RK, b, groups, transposed, row_scale, column_scale, bias_EN, dtype)


def tokens_matmul(
    a_RN: Tensor,
    b_RK: Tensor,
    groups: Groups,
    *,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multiply over the rows of each expert: ``w[e] = a[rows of e]^T @ b[rows of e]``, float32 (E, N, K).

    Args:
        a_RN: GEMM operand; BF16 on CUDA, BF16 values on a CPU.
        b_RK: the other.
        groups: rows of each expert.
        row_scale: float32 tensor scale of a, (1 or E, 1 or N).
        column_scale: float32 tensor scale of b, (1 or E, 1 or K).
        backend: as `ops.quantize`.
    """
    if groups.num == 1:  # it owns all rows, the zeros that complete a Hadamard transform included
        groups = Groups.of((len(a_RN),))
    if has_kernels(a_RN, backend):
        return kernels().tokens(a_RN, b_RK, groups.on_device(a_RN.device), row_scale, column_scale)
    return grouped.tokens(a_RN, b_RK, groups, row_scale, column_scale)


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

"""Host side of the grouped GEMMs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightning_nvfp4.ops.layout import ceil_div
from lightning_nvfp4.ops.triton.device import gemm_kernel
from lightning_nvfp4.ops.triton.geometry import given, power_of_two
from lightning_nvfp4.ops.triton.runtime import launch

kernels: Any = gemm_kernel
_ALIGNED = 8
"""BF16 elements of 16 bytes, to which the tensor copy engine wants rows aligned."""
_ROWS = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3}
_ROWS_SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
_TOKENS = {"BLOCK_N": 128, "BLOCK_K": 256, "BLOCK_R": 64, "GROUP_N": 8, "num_warps": 8, "num_stages": 3}
_TOKENS_SMALL = {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_R": 32, "GROUP_N": 8, "num_warps": 4, "num_stages": 3}


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def rows(
    a_RK: Tensor,
    b: Tensor,
    offsets: Tensor,
    transposed: bool,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the product (R, N) of each expert's rows with its matrix.

    Args:
        a_RK: BF16.
        b: BF16 (E, N, K) if `transposed`, else (E, K, N).
        offsets: int32 (E + 1), first row of each expert and the end of the last; rows after it are not written.
        transposed: see `b`.
        row_scale: float32, () or (R, 1).
        column_scale: float32, broadcastable to (E, N).
        bias_EN: any floating-point dtype, added in FP32.
        dtype: of the result.
    """
    num_experts = b.shape[0]
    num_r, num_n = a_RK.shape[0], b.shape[1] if transposed else b.shape[2]
    out = torch.empty(num_r, num_n, dtype=dtype, device=a_RK.device)
    if out.numel() == 0 or a_RK.shape[1] == 0:
        return out.zero_()
    if isinstance(out, FakeTensor):
        return out
    a_RK, b = _aligned(a_RK), _aligned(b)
    num_k = min(a_RK.shape[1], b.shape[2]) if transposed else b.shape[1]
    small = num_r <= 64 * num_experts or num_n <= 64 or not a_RK.is_cuda
    config = dict(_ROWS_SMALL if small else _ROWS)
    block_b = (1, config["BLOCK_N"], config["BLOCK_K"]) if transposed else (1, config["BLOCK_K"], config["BLOCK_N"])
    row_stride = 0 if row_scale is None or row_scale.numel() == 1 else 1
    column, strides = _expanded(column_scale, num_experts, num_n)
    tiles = (ceil_div(num_r, config["BLOCK_M"]) + num_experts) * ceil_div(num_n, config["BLOCK_N"])
    programs = min(_programs(a_RK.device), tiles)
    launch(
        kernels.rows_kernel, (programs,), a_RK,
        TensorDescriptor.from_tensor(a_RK, [config["BLOCK_M"], config["BLOCK_K"]]),
        TensorDescriptor.from_tensor(b, list(block_b)),
        out, offsets, given(row_scale, out), given(column, out), given(bias_EN, out),
        num_experts, num_n, num_k, row_stride, *strides,
        TRANSPOSED=transposed, SCALES=(row_scale is not None) + _column_flag(column_scale),
        HAS_BIAS=bias_EN is not None, E_POWER=power_of_two(num_experts), NUM_PROGRAMS=programs,
        **config,
    )  # fmt: skip
    return out


def tokens(
    a_RN: Tensor, b_RK: Tensor, offsets: Tensor, row_scale: Tensor | None, column_scale: Tensor | None
) -> Tensor:
    """Return float32 (E, N, K): for each expert the product, contracted over its rows, of its parts of a and b.

    Args:
        a_RN: BF16.
        b_RK: BF16.
        offsets: int32 (E + 1).
        row_scale: float32, broadcastable to (E, N).
        column_scale: float32, broadcastable to (E, K).
    """
    num_experts, num_n, num_k = len(offsets) - 1, a_RN.shape[1], b_RK.shape[1]
    out = torch.empty(num_experts, num_n, num_k, dtype=torch.float32, device=a_RN.device)
    if out.numel() == 0 or a_RN.shape[0] == 0:
        return out.zero_()
    if isinstance(out, FakeTensor):
        return out
    small = num_n <= 64 or num_k <= 64 or not a_RN.is_cuda
    config = dict(_TOKENS_SMALL if small else _TOKENS)
    a, b = _aligned(a_RN), _aligned(b_RK)
    row, row_strides = _expanded(row_scale, num_experts, num_n)
    column, column_strides = _expanded(column_scale, num_experts, num_k)
    tiles = num_experts * ceil_div(num_n, config["BLOCK_N"]) * ceil_div(num_k, config["BLOCK_K"])
    programs = min(_programs(a.device), tiles)
    launch(
        kernels.tokens_kernel, (programs,), a,
        TensorDescriptor.from_tensor(a, [config["BLOCK_R"], config["BLOCK_N"]]),
        TensorDescriptor.from_tensor(b, [config["BLOCK_R"], config["BLOCK_K"]]),
        a, b, out, offsets, given(row, out), given(column, out),
        num_experts, num_n, num_k, a.stride(0), b.stride(0), *row_strides, *column_strides,
        SCALES=(row is not None) + _column_flag(column_scale), NUM_PROGRAMS=programs,
        **config,
    )  # fmt: skip
    return out


def _aligned(x: Tensor) -> Tensor:
    """Return x contiguous in rows of whole 16 bytes, zeros appended where needed."""
    missing = -x.shape[-1] % _ALIGNED
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()


def _expanded(scale: Tensor | None, num_experts: int, n: int) -> tuple[Tensor | None, tuple[int, int]]:
    if scale is None:
        return None, (0, 0)
    spread = scale.expand(num_experts, n)
    return spread, (spread.stride(0), spread.stride(1))


def _column_flag(scale: Tensor | None) -> int:
    return 0 if scale is None else 2 if scale.shape[-1] == 1 else 4

"""Arithmetic on tensors: quantize, decode, and the GEMM of quantized operands."""

from lightning_nvfp4.ops.backends import has_kernels, kernels
from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.epilogue import apply_tensor_scales
from lightning_nvfp4.ops.gemm import matmul, rows_matmul, tokens_matmul
from lightning_nvfp4.ops.groups import Groups
from lightning_nvfp4.ops.interface import QuantizedMeta
from lightning_nvfp4.ops.reference.scales import finite_amax
from lightning_nvfp4.ops.select import (
    hadamard_transform,
    quantize,
    quantize_values,
    quantize_values_twice,
    quantize_with_values,
    requantize_values,
)

__all__ = [
    "Groups",
    "QuantizedMeta",
    "QuantizedTensor",
    "apply_tensor_scales",
    "finite_amax",
    "hadamard_transform",
    "has_kernels",
    "kernels",
    "matmul",
    "quantize",
    "quantize_values",
    "quantize_values_twice",
    "quantize_with_values",
    "requantize_values",
    "rows_matmul",
    "tokens_matmul",
]

"""Arithmetic on tensors: quantize, decode, and the GEMM of quantized operands."""

from lightning_nvfp4.ops.contract import QuantizedMeta, QuantizedTensor
from lightning_nvfp4.ops.reference.gemm import apply_tensor_scales, matmul
from lightning_nvfp4.ops.reference.scales import finite_amax
from lightning_nvfp4.ops.select import hadamard_transform, quantize, quantize_values

__all__ = [
    "QuantizedMeta",
    "QuantizedTensor",
    "apply_tensor_scales",
    "finite_amax",
    "hadamard_transform",
    "matmul",
    "quantize",
    "quantize_values",
]

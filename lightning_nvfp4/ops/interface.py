"""What a backend of the numerics provides; `ops.reference` and `ops.triton` each have a module with these functions."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_nvfp4.recipe import QuantSpec


class QuantizedMeta(NamedTuple):
    """What a `QuantizedTensor` holds besides tensors; hashable.

    Attributes:
        spec: the format.
        shape: shape of the tensor that was quantized.
        dim: the quantized dim, non-negative.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    dim: int


class Parts(NamedTuple):
    """What quantization gives; entries that were not asked for are ``None``.

    Attributes:
        codes, block_scale: as `ops.contract.QuantizedTensor` lays them out.
        values: unscaled values in the layout of the tensor, the quantized dim of the stored length.
        tensor_scale: decode tensor scale; ``None`` for formats without.
        amax: what it comes from.
    """

    codes: Tensor | None
    block_scale: Tensor | None
    values: Tensor | None
    tensor_scale: Tensor | None
    amax: Tensor | None


class Backend(Protocol):
    """Functions of a backend; tensors are not empty, `dim` is non-negative, arguments were checked."""

    def quantize(
        self,
        x: Tensor,
        spec: QuantSpec,
        dim: int,
        seed: int | Tensor,
        amax: Tensor | None,
        codes: bool,
        values: torch.dtype | None,
    ) -> Parts:
        """Quantize x along `dim`; return codes if asked, and unscaled values of the dtype `values` unless ``None``."""
        ...

    def decode(
        self,
        codes: Tensor,
        block_scale: Tensor,
        tensor_scale: Tensor | None,
        spec: QuantSpec,
        shape: tuple[int, ...],
        dim: int,
        dtype: torch.dtype,
        inverse: bool,
    ) -> Tensor:
        """Return codes times block scales (times tensor scale) in the layout of the tensor.

        Under `inverse` the transform is undone and the result has `shape`; else the quantized dim is of stored length.
        """
        ...

    def transform(self, x: Tensor, spec: QuantSpec, dim: int) -> Tensor:
        """Return x under the spec's Hadamard transform, float32, `dim` padded to whole transforms."""
        ...

    def quantize_twice(
        self, x: Tensor, along_last: QuantSpec, along_first: QuantSpec, seed: int | Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the unscaled values of a matrix quantized along its last, and along its first dim."""
        ...

    def requantize(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        meta: QuantizedMeta,
        spec: QuantSpec,
        dim: int,
        seed: int | Tensor,
        dtype: torch.dtype,
        source: torch.dtype,
    ) -> Tensor | None:
        """Return the unscaled values of a quantized tensor in another format, or ``None`` where two steps are needed.

        Args:
            tensors: as `QuantizedTensor.tensors` returns them.
            meta: its meta.
            spec: the new format.
            dim: the new quantized dim.
            seed: of the new stochastic rounding.
            dtype: of the result.
            source: dtype that the dequantized tensor is rounded to in between, float32 or bfloat16.
        """
        ...

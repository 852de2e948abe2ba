"""`QuantizedTensor`: packed codes with their scales, and what they decode to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_nvfp4.ops.backends import backend_for
from lightning_nvfp4.ops.interface import QuantizedMeta
from lightning_nvfp4.ops.layout import stored_length
from lightning_nvfp4.recipe import QuantSpec


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in a block format.

    The quantized dim is moved last: with L the other dims and K the length of the quantized one, codes of K elements
    stand for each of L. Under RHT a row holds whole transforms, so K is rounded up to a multiple of the transform's
    length (`length`); otherwise nothing is padded. Nothing is swizzled.

    Attributes:
        codes: ``nvfp4`` uint8 (L, ceil(K / 2)), two codes a byte, low nibble first; ``mxfp8`` and ``fp8_block`` uint8
            (L, K); ``s2f6`` int8 (L, K). A block with a NaN or infinite element holds zeros.
        block_scale: uint8 (L, ceil(K / B)) raw bits, E4M3 for ``nvfp4``, E8M0 for the others; 2D blocks repeat theirs
            in each of their rows. A block with a NaN or infinite element has the NaN code (0x7F, 0xFF).
        tensor_scale: float32 *decode* scale, broadcastable to `block_scale`: shape () for a tensor, (rows, 1) per row,
            (experts, 1, 1) for 3D weights, or the shape of the amax that was given; ``None`` without one.
        amax: float32 amax over finite elements (after RHT) that the tensor scale comes from, same shape, or ``None``.
        spec: the format.
        shape: shape of the tensor that was quantized.
        dim: the quantized dim in `shape`, non-negative.
    """

    codes: Tensor
    block_scale: Tensor
    tensor_scale: Tensor | None
    amax: Tensor | None
    spec: QuantSpec
    shape: tuple[int, ...]
    dim: int

    @property
    def length(self) -> int:
        """Elements of a row of codes: the quantized dim, rounded up to whole transforms under RHT."""
        return stored_length(self.shape[self.dim], self.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return sum(t.numel() * t.element_size() for t in self.tensors() if t is not None)

    @property
    def meta(self) -> QuantizedMeta:
        """All that `from_tensors` needs besides `tensors`."""
        return QuantizedMeta(self.spec, self.shape, self.dim)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return (codes, block_scale, tensor_scale, amax), as ``ctx.save_for_backward(*q.tensors())`` takes them."""
        return self.codes, self.block_scale, self.tensor_scale, self.amax

    @classmethod
    def from_tensors(
        cls, meta: QuantizedMeta, tensors: tuple[Tensor | None, ...] | list[Tensor | None]
    ) -> QuantizedTensor:
        """Put `meta` and `tensors` together again."""
        codes, block_scale, tensor_scale, amax = tensors
        if codes is None or block_scale is None:
            raise ValueError("QuantizedTensor.from_tensors needs codes and block_scale: pass what tensors() returned.")
        return cls(codes, block_scale, tensor_scale, amax, meta.spec, meta.shape, meta.dim)

    def unscaled_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return codes times block scales, (L, `length`), the quantized dim last.

        Neither the tensor scale nor the inverse transform is applied. Exact in float32; exact in bfloat16 for ``nvfp4``
        always (at most 6 significant bits), for the E8M0 formats where the scale code is at least 3 (E4M3), 10 (E5M2)
        or 0 (S2F6). NaN in blocks that are not finite.

        Args:
            dtype: of the result.
        """
        return self.operand(dtype).movedim(self.dim, -1)

    def operand(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `unscaled_values` in the order of dims of the tensor that was quantized, as a GEMM takes it."""
        if self.codes.numel() == 0:
            shape = (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])
            return torch.zeros(shape, dtype=dtype, device=self.codes.device)
        return self._decode(None, dtype, False)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the decoded tensor in its original shape and order of dims.

        A tensor scale that varies along the blocks (an explicit amax of shape (..., C)) multiplies the elements of its
        block; the order is (codes * block scale) exactly, times tensor scale, then the inverse transform.

        Args:
            dtype: of the result; the arithmetic is float32.
        """
        if self.codes.numel() == 0:
            return torch.zeros(self.shape, dtype=dtype, device=self.codes.device)
        return self._decode(self.tensor_scale, dtype, True)

    def _decode(self, tensor_scale: Tensor | None, dtype: torch.dtype, inverse: bool) -> Tensor:
        backend = backend_for(self.codes, self.spec)
        return backend.decode(
            self.codes, self.block_scale, tensor_scale, self.spec, self.shape, self.dim, dtype, inverse
        )

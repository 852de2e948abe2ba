"""MXFP8 with stochastic rounding as a TE quantizer: TE has none. Importing this module imports TE.

It fills TE's own MXFP8 tensor, which TE's GEMMs take, with the codes and scales of our kernels. TE would drop a plain
subclass in several places: its C++ knows quantizers by their exact type, and `copy` and the cache of a weight make TE's
own. So it is used as both halves of a ``HybridQuantizer``, which TE never hands to its C++, and overrides the rest.

Source: TransformerEngine 2.20, pytorch/tensor/mxfp8_tensor.py, pytorch/module/base.py (`grad_output_preprocess`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor
from torch.nn.functional import pad
from transformer_engine.common.recipe import CustomRecipe

from lightning_nvfp4.formats.block import MXFP8
from lightning_nvfp4.formats.rounding import STOCHASTIC
from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.recipe import QuantSpec

_ROWS, _COLUMNS = 128, 4
"""TE pads scale matrices to multiples of these (rows: along the dim that is not quantized)."""


class StochasticMXFP8Quantizer(te.MXFP8Quantizer):
    """TE's MXFP8 quantizer with our stochastic rounding.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``kFloat8E5M2``.
        rowwise, columnwise: planes to make.
        with_2d_quantization: false; there is no stochastic rounding in blocks of 32x32.
        gradient: the seed, and the whole tensor of which parts are quantized.
    """

    calls = 0
    """How often any of them ran."""

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        gradient: Gradient | None = None,
    ) -> None:
        if with_2d_quantization:
            raise ValueError("Stochastic MXFP8 has blocks of 1x32 only: set with_2d_quantization=False.")
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise, with_2d_quantization=False)
        element = "e5m2" if self.dtype == te.DType.kFloat8E5M2 else "e4m3"
        self.spec = QuantSpec("mxfp8", element=element, rounding=STOCHASTIC)
        self.gradient = gradient or Gradient()

    def copy(self) -> StochasticMXFP8Quantizer:
        """Return a copy that rounds as this one does."""
        made = StochasticMXFP8Quantizer(
            self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage, gradient=self.gradient
        )
        made.internal, made.optimize_for_gemm = self.internal, self.optimize_for_gemm
        return made

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Quantize (..., N) to the planes that are in use; scales compact, padded as TE pads them."""
        StochasticMXFP8Quantizer.calls += 1
        planes = self._planes(tensor)
        common = {"fp8_dtype": self.dtype, "quantizer": self, "with_gemm_swizzled_scales": False}
        if self.internal:
            return te.MXFP8TensorStorage(**planes, **common, fake_dtype=tensor.dtype)
        return te.MXFP8Tensor(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, **planes, **common)

    def _planes(self, tensor: Tensor) -> dict[str, Tensor | None]:
        made: dict[str, Tensor | None] = dict.fromkeys(
            ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        )
        flat = tensor.reshape(-1, tensor.shape[-1])
        if self.rowwise_usage:
            codes, scales = self.gradient.quantized(flat, self.spec, 1)
            made["rowwise_data"], made["rowwise_scale_inv"] = (
                codes.reshape(tensor.shape),
                _padded(scales, _ROWS, _COLUMNS),
            )
        if self.columnwise_usage:
            codes, scales = self.gradient.quantized(flat, self.spec, 0)
            made["columnwise_data"] = codes.reshape(tensor.shape)
            made["columnwise_scale_inv"] = _padded(scales, _COLUMNS, _ROWS)
        return made

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Quantize into a tensor that was made before."""
        if noop_flag is not None:
            raise ValueError("A stochastic MXFP8 tensor cannot be updated under a noop flag: quantize it anew.")
        for name, plane in self._planes(src).items():
            if plane is not None:
                getattr(dst, f"_{name}").copy_(plane)
        dst._fp8_dtype, dst._with_gemm_swizzled_scales = self.dtype, False
        return dst

    def make_empty(self, shape: Iterable[int], **options: Any) -> Any:
        """Return an uninitialized tensor, made by TE's own quantizer, which its C++ knows."""
        plain = te.MXFP8Quantizer(self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        plain.internal = self.internal
        return plain.make_empty(shape, **options)

    def is_requantization_safe(self) -> bool:
        """Return false: TE must not throw a tensor away to quantize it again later."""
        return False

    def is_quantizable(self, inp: Tensor) -> bool:
        """Return whether TE may gather a tensor in this format: blocks have to be whole."""
        return inp.ndim > 1 and not (inp.shape[-1] % MXFP8.length or (inp.numel() // inp.shape[-1]) % MXFP8.length)

    def _get_compatible_recipe(self) -> Any:
        return CustomRecipe


def _padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    missing = (-scales.shape[1] % columns, -scales.shape[0] % rows)
    return pad(scales, (0, missing[0], 0, missing[1])) if any(missing) else scales.contiguous()

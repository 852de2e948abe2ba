"""Emulated quantizers for TE's modules: the wiring of a Blackwell GPU on one that lacks its formats.

They take the places of TE's quantizers in a custom recipe. TE multiplies what they decode to in BF16; a tensor scale is
folded into that, so the products are those of `ops.gemm` up to one rounding of an operand, and the codes are equal.

Source: TransformerEngine 2.20, pytorch/cpp_extensions/gemm.py (`_unwrap_tensor`), pytorch/quantized_tensor.py.
Importing this module imports TE.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from lightning_nvfp4.ops.contract import QuantizedTensor
from lightning_nvfp4.ops.select import quantize
from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.ops.te.plan import QuantizerPlan
from lightning_nvfp4.recipe import QuantSpec


def build(plan: QuantizerPlan, gradient: Gradient) -> Any:
    """Make the emulated quantizer of a plan; see `recipes.Build`."""
    planes = {"rowwise": plan.fields["rowwise"], "columnwise": plan.fields["columnwise"]}
    if plan.spec is None:
        return te.IdentityQuantizer(dtype=torch.bfloat16, **planes)
    if all(planes.values()):  # apart, or TE would hand the gradient of a layer with a bias to its C++
        return te.HybridQuantizer(
            rowwise_quantizer=EmulatedQuantizer(plan.spec, gradient, columnwise=False),
            columnwise_quantizer=EmulatedQuantizer(plan.spec, gradient, rowwise=False),
        )
    return EmulatedQuantizer(plan.spec, gradient, **planes)


class EmulatedQuantizer(te.Quantizer):
    """A quantizer of any of our formats.

    Args:
        spec: of both planes.
        gradient: the seed, and the whole tensor of which parts are quantized under stochastic rounding.
        rowwise, columnwise: planes to make.
    """

    def __init__(self, spec: QuantSpec, gradient: Gradient, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.spec, self.gradient = spec, gradient

    def copy(self) -> EmulatedQuantizer:
        """Return a copy that rounds as this one does."""
        made = EmulatedQuantizer(self.spec, self.gradient, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        made.internal, made.optimize_for_gemm = self.internal, self.optimize_for_gemm
        return made

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> EmulatedTensor:
        """Quantize a matrix to the planes that are in use."""
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        rowwise = self._plane(flat, 1) if self.rowwise_usage else None
        columnwise = self._plane(flat, 0) if self.columnwise_usage else None
        return EmulatedTensor(rowwise, columnwise, tuple(tensor.shape), tensor.dtype, self)

    def _plane(self, flat: Tensor, dim: int) -> QuantizedTensor:
        if self.spec.rounding == "nearest" or self.spec.tensor_scale != "none":
            return quantize(flat, self.spec, dim=dim, seed=self.gradient.seed)
        codes, scales = self.gradient.quantized(flat, self.spec, dim)
        if dim == 0:
            codes, scales = codes.t().contiguous(), scales.t().contiguous()
        return QuantizedTensor(codes, scales, None, None, self.spec, tuple(flat.shape), dim)

    def is_requantization_safe(self) -> bool:
        """Return whether the same tensor gives the same codes again."""
        return self.spec.rounding == "nearest"

    def _get_compatible_recipe(self) -> None:
        return None


class EmulatedTensor(te.QuantizedTensorStorage):
    """What an `EmulatedQuantizer` makes: a contract `QuantizedTensor` for each plane."""

    def __init__(
        self,
        rowwise: QuantizedTensor | None,
        columnwise: QuantizedTensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: EmulatedQuantizer,
    ) -> None:
        self.planes = {"rowwise": rowwise, "columnwise": columnwise}
        self._shape, self._dtype, self._quantizer = shape, dtype, quantizer
        self._meta: list[Any] = []

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values; without a dtype BF16, as GEMMs take them."""
        plane = self.planes["rowwise"] or self.planes["columnwise"]
        if plane is None:
            raise RuntimeError("The emulated tensor has no plane left.")
        return plane.dequantize(dtype or torch.bfloat16).reshape(self._shape)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a plane, or raise where one is asked for that was not made."""
        for name, wanted in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)):
            if wanted and self.planes[name] is None:
                raise RuntimeError(f"The emulated tensor has no {name} plane.")
            if wanted is False:
                self.planes[name] = None

    def get_usages(self) -> dict[str, bool]:
        """Return which planes there are."""
        return {name: plane is not None for name, plane in self.planes.items()}

    def prepare_for_saving(self) -> tuple[list[Tensor | None], EmulatedTensor]:
        """Give the tensors to autograd."""
        tensors: list[Tensor | None] = []
        self._meta = []
        for name, plane in self.planes.items():
            self._meta.append((name, None if plane is None else plane.meta))
            tensors += [None] * 4 if plane is None else plane.tensors()
            self.planes[name] = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take them back."""
        for i, (name, meta) in enumerate(self._meta):
            parts = tensors[4 * i : 4 * i + 4]
            self.planes[name] = None if meta is None else QuantizedTensor.from_tensors(meta, parts)
        return tensors[4 * len(self._meta) :]

    def get_data_tensors(self) -> tuple[Tensor, ...]:
        """Return the codes."""
        return tuple(plane.codes for plane in self.planes.values() if plane is not None)

    def clear(self) -> None:
        """Let go of both planes."""
        self.planes = dict.fromkeys(self.planes)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the tensor that was quantized."""
        return torch.Size(self._shape) if dim is None else self._shape[dim]

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.get_data_tensors()[0].device

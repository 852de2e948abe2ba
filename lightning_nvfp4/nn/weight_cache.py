"""Weights quantized once per optimizer step: for all micro-batches of an accumulation, and for recomputed forwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.formats.rounding import NEAREST
from lightning_nvfp4.ops import QuantizedTensor
from lightning_nvfp4.recipe import QuantSpec


class _Entry(NamedTuple):
    """A packed weight, and what it holds for: the weight's memory (kept alive here), how often it was written."""

    weight: Tensor
    version: int
    spec: QuantSpec
    quantized: QuantizedTensor


class WeightCache:
    """Packed weights by layer, for as long as the weights stay what they are.

    A generation is one optimizer step: `NumericsContext.begin` starts the next, and before the first there is no cache,
    so that a training loop without the plugin never meets one. Inside a generation a weight that is written in place,
    or replaced, is quantized again. A weight written behind autograd's back (``p.data.copy_``) inside a step, and not
    written back before the next micro-batch, needs `next_generation`.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._entries: dict[int, _Entry] = {}

    def next_generation(self) -> None:
        """Forget every entry: weights have changed, or may have."""
        self.generation += 1
        self._entries.clear()

    def get(self, layer: int, weight: Tensor, spec: QuantSpec) -> QuantizedTensor | None:
        """Return the packed weight of a layer, or ``None`` if there is none for this state of it."""
        entry = self._entries.get(layer)
        if entry is None or not self._covers(weight, spec):
            return None
        same = entry.weight.data_ptr() == weight.data_ptr() and entry.version == weight._version and entry.spec == spec
        return entry.quantized if same else None

    def put(self, layer: int, weight: Tensor, spec: QuantSpec, quantized: QuantizedTensor) -> None:
        """Keep the packed weight of a layer."""
        if self._covers(weight, spec):
            self._entries[layer] = _Entry(weight.detach(), weight._version, spec, quantized)

    def _covers(self, weight: Tensor, spec: QuantSpec) -> bool:
        """Stochastic weights differ between micro-batches; a traced graph holds no entries."""
        if torch.compiler.is_compiling() or weight.is_inference():
            return False
        return self.generation > 0 and spec.rounding == NEAREST

"""Weights quantized once per optimizer step: by micro-batches of an accumulation, and by recomputed forwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.formats.rounding import NEAREST
from lightning_nvfp4.ops import QuantizedTensor
from lightning_nvfp4.recipe import QuantSpec


class _Key(NamedTuple):
    """What an entry holds for: the generation, the memory of the weight, how often it was written, and the format."""

    generation: int
    address: int
    version: int
    spec: QuantSpec


class WeightCache:
    """Packed weights by layer, for as long as the weights stay what they are.

    A new generation begins with every optimizer step, checkpoint load and change between training and validation (where
    an average of the weights may be swapped in). A weight written in place by torch is noticed besides; one that is
    changed behind autograd's back (``p.data.copy_``) inside a step needs `next_generation`.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._entries: dict[int, tuple[_Key, QuantizedTensor]] = {}

    def next_generation(self) -> None:
        """Forget every entry: weights have changed, or may have."""
        self.generation += 1
        self._entries.clear()

    def get(self, layer: int, weight: Tensor, spec: QuantSpec) -> QuantizedTensor | None:
        """Return the packed weight of a layer, or ``None`` if there is none for this state of it."""
        entry = self._entries.get(layer) if self._covers(spec) else None
        return entry[1] if entry is not None and entry[0] == self._key(weight, spec) else None

    def put(self, layer: int, weight: Tensor, spec: QuantSpec, quantized: QuantizedTensor) -> None:
        """Keep the packed weight of a layer."""
        if self._covers(spec):
            self._entries[layer] = (self._key(weight, spec), quantized)

    def _key(self, weight: Tensor, spec: QuantSpec) -> _Key:
        version = -1 if weight.is_inference() else weight._version
        return _Key(self.generation, weight.data_ptr(), version, spec)

    @staticmethod
    def _covers(spec: QuantSpec) -> bool:
        """Stochastic weights differ between micro-batches; a traced graph holds no entries."""
        return spec.rounding == NEAREST and not torch.compiler.is_compiling()

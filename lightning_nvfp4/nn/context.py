"""What all converted layers of one model share: the seed of the step, precision switches, the weight cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_nvfp4.nn.weight_cache import WeightCache
from lightning_nvfp4.ops.te.layers import Layers
from lightning_nvfp4.ops.te.plan import ROWS
from lightning_nvfp4.recipe import OPERANDS, GemmRecipe

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, SplitMix64's own: multiples of it are far apart."""


def derive_seed(*parts: int) -> int:
    """Mix integers into one 64-bit seed; every argument and its position matter.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), chained over the arguments.
    """
    state = 0
    for part in parts:
        state = _mixed(state + (part & _MASK))
    return state


def derive_seeds(first: int, *counts: int) -> Tensor:
    """Return ``derive_seed(first, i, j, ...)`` for all i, j, ... below `counts`, int64 of that shape."""
    state = np.array([derive_seed(first)], np.uint64)
    for count in counts:
        state = _mixed(state[..., None] + np.arange(count, dtype=np.uint64))
    return torch.from_numpy(state[0].view(np.int64))


def _mixed(state: Any) -> Any:
    """Advance an integer, or each of an array of uint64, which wraps by itself."""
    state = (state + _STEP) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@dataclass
class NumericsContext:
    """Mutable state shared by reference between the converted layers of one model.

    Attributes:
        step_seed: seed of the current optimizer step and micro-batch; each operand of each layer adds its own stream.
        shared_seed: the same for all ranks.
        forward_high_precision, backward_high_precision: run those GEMMs in BF16 (see `PrecisionSchedule`).
        weights: packed weights of the current optimizer step, under a generation counter.
        num_layers: one more than the largest `LayerNumerics.index`.
        seeds: int64 (layers, operands) of the current micro-batch on the device, or ``None``: a graph that is traced
            once reads them there, and a launch on CUDA need not fill in one.
        te_layers: Transformer Engine's modules of the layers that run in it.
        weight_cache: while not ``None``, quantized forward weights by (layer, operand); see `cached_weights`.
        observer: while not ``None``, is shown the operands of every layer; see `nn.observer.Observer`.
    """

    step_seed: int = 0
    shared_seed: int = 0
    forward_high_precision: bool = False
    backward_high_precision: bool = False
    weights: WeightCache = field(default_factory=WeightCache)
    te_layers: Layers = field(default_factory=Layers)
    weight_cache: dict[int, tuple[Tensor, Tensor | None]] | None = None
    observer: Any = None
    step: tuple[int, ...] | None = None
    num_layers: int = 0
    seeds: Tensor | None = None

    def begin(
        self,
        run_seed: int,
        rank: int,
        step: int,
        micro_batch: int,
        model: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Set the seed for the forward and backward of one micro-batch; the same arguments replay the same bits.

        With a `device` the seeds of all layers are put there; the bits are the same.
        """
        if self.step != (run_seed, step):
            self.step = (run_seed, step)
            self.weights.next_generation()
        self.step_seed = derive_seed(run_seed, rank, step, micro_batch, *([model] if model else []))
        self.shared_seed = derive_seed(run_seed, step, micro_batch, *([model] if model else []))
        self.seeds = None
        if device is not None:
            table = derive_seeds(self.step_seed, self.num_layers, len(OPERANDS))
            self.seeds = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table

    @contextmanager
    def cached_weights(self) -> Iterator[None]:
        """Quantize each forward weight once while open and gradients are off; weights must not change inside."""
        previous, self.weight_cache = self.weight_cache, {}
        try:
            yield
        finally:
            self.weight_cache = previous


@dataclass(frozen=True)
class LayerNumerics:
    """The numerics of one GEMM layer.

    Attributes:
        gemm: quantizers of the operands.
        context: shared state.
        index: number of the layer in the model, part of its stochastic-rounding seed.
        backend: where the quantizers and GEMMs run; see `lightning_nvfp4.capability`.
        kept: the layer stays in high precision; `gemm` has BF16 operands only.
        native: Transformer Engine multiplies where the input is on CUDA; elsewhere the layer is emulated.
        part: which part of a micro-batch's tokens the layer is called with; each draws random bits of its own.
    """

    gemm: GemmRecipe
    context: NumericsContext = field(compare=False)
    index: int
    backend: str = "auto"
    kept: bool = False
    native: bool = False
    part: int = 0

    def of_part(self, part: int) -> LayerNumerics:
        """Return the numerics for another part of the tokens."""
        return self if part == self.part else dataclasses.replace(self, part=part)

    @property
    def tokens_alignment(self) -> int:
        """Multiple to which an expert's rows are padded."""
        return max(self.gemm.tokens_alignment, ROWS if self.native else 1)

    def seed(self, operand: str) -> int | Tensor:
        """Return the stochastic-rounding seed of `operand` (a name of `recipe.OPERANDS`) in the current micro-batch.

        A weight has the same in all parts of the tokens.
        """
        stream = _stream(operand)
        shift = 0 if operand.endswith("weight") else self.part * _STEP & _MASK
        seeds = self.context.seeds
        if seeds is not None and (seeds.is_cuda or torch.compiler.is_compiling()):
            seed = seeds[self.index, stream]
            return seed + (shift - (shift >> 63 << 64)) if shift else seed
        return derive_seed(self.context.step_seed, self.index, stream) + shift & _MASK

    def segment_seed(self, operand: str, number: int) -> int:
        """Return the seed of a part of the rows that is known by a number, the same on whichever rank it is."""
        return derive_seed(self.context.shared_seed, self.index, _stream(operand), number)

    def effective(self) -> GemmRecipe:
        """Return the numerics with the context's precision switches applied."""
        changes: dict[str, None] = {}
        if self.context.forward_high_precision:
            changes |= {name: None for name in OPERANDS if name.startswith("fprop")}
        if self.context.backward_high_precision:
            changes |= {name: None for name in OPERANDS if not name.startswith("fprop")}
        return dataclasses.replace(self.gemm, **changes) if changes else self.gemm


def _stream(operand: str) -> int:
    """Return the number of an operand's stream; the output's gradient has one: a pass draws for dgrad and wgrad."""
    return OPERANDS.index("dgrad_grad_output" if operand == "wgrad_grad_output" else operand)

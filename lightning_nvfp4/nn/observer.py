"""What quantization does to the operands of every layer, seen from inside one forward and backward.

Shapes: R rows (tokens, sorted by expert), E experts, N and K the weight's dims.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_nvfp4.formats.element import ELEMENTS
from lightning_nvfp4.formats.rounding import STOCHASTIC
from lightning_nvfp4.nn.context import LayerNumerics
from lightning_nvfp4.nn.operands import along_features, along_tokens
from lightning_nvfp4.ops import Groups, QuantizedTensor, hadamard_transform, quantize
from lightning_nvfp4.ops.layout import expand_scale, unpack_nibbles

SUMS = ("signal", "noise", "saturated", "flushed", "nonzero")
"""What `operand_sums` adds up, in its order; the largest magnitude comes last."""


class Observer:
    """Keeps the sums of each operand of each layer that passes; nothing that the layers compute changes.

    A layer's first forward with a backward counts: neither a recomputed forward nor a second call adds to it.

    Args:
        wanted: tells by `LayerNumerics.index` whether to look at a layer.
    """

    def __init__(self, wanted: Callable[[int], bool] = lambda index: True) -> None:
        self.sums: dict[tuple[int, str], Tensor] = {}
        self._wanted = wanted
        self._seen: set[int] = set()

    def watch(
        self,
        x_RK: Tensor | None,
        w_ENK: Tensor,
        y_RN: Tensor,
        groups: Groups,
        numerics: LayerNumerics,
    ) -> None:
        """Look at the operands of ``y = x @ w^T``: now, and once the gradient of y is there.

        Args:
            x_RK: activations; ``None`` where they came as codes.
            w_ENK: master weights.
            y_RN: the result, in the autograd graph.
            groups: rows of each expert.
            numerics: quantizers and seeds of the layer.
        """
        index, gemm = numerics.index, numerics.effective()
        if index in self._seen or not y_RN.requires_grad or not gemm.formats() or not self._wanted(index):
            return
        self._seen.add(index)
        dequantized = gemm.source == "dequantized"
        with torch.no_grad(), torch.autocast(y_RN.device.type, enabled=False):
            if x_RK is not None:
                x_RK, seen = x_RK.detach().to(torch.bfloat16), None
                if gemm.fprop_input is not None:
                    tokens = along_features(x_RK, gemm.fprop_input, _seed(numerics, "fprop_input"), groups, "auto")
                    seen = tokens.packed()
                    self._add(index, "fprop_input", tokens.x, seen)
                if gemm.wgrad_input is not None:
                    seed = _seed(numerics, "wgrad_input")
                    source = seen.dequantize(torch.bfloat16) if dequantized and seen is not None else x_RK
                    tokens = along_tokens(source, gemm.wgrad_input, seed, groups, "auto")
                    exact = tokens if source is x_RK else along_tokens(x_RK, gemm.wgrad_input, seed, groups, "auto")
                    self._add(index, "wgrad_input", exact.x, tokens.packed())
            w_ENK, seen = w_ENK.detach(), None
            if gemm.fprop_weight is not None:
                seen = quantize(w_ENK, gemm.fprop_weight, seed=_seed(numerics, "fprop_weight"))
                self._add(index, "fprop_weight", w_ENK, seen)
            if gemm.dgrad_weight is not None:
                source = seen.dequantize() if dequantized and seen is not None else w_ENK
                again = quantize(source, gemm.dgrad_weight, dim=-2, seed=_seed(numerics, "dgrad_weight"))
                self._add(index, "dgrad_weight", w_ENK, again)
        seeds = {name: _seed(numerics, name) for name in ("dgrad_grad_output", "wgrad_grad_output")}

        def gradient(dy_RN: Tensor) -> None:
            with torch.no_grad(), torch.autocast(dy_RN.device.type, enabled=False):
                dy_RN = dy_RN.detach().to(torch.bfloat16)
                for name, along in (("dgrad_grad_output", along_features), ("wgrad_grad_output", along_tokens)):
                    if (spec := getattr(gemm, name)) is not None:
                        tokens = along(dy_RN, spec, seeds[name], groups, "auto")
                        self._add(index, name, tokens.x, tokens.packed())

        y_RN.register_hook(gradient)

    def _add(self, index: int, operand: str, x: Tensor, q: QuantizedTensor) -> None:
        self.sums.setdefault((index, operand), operand_sums(x, q))


def operand_sums(x: Tensor, q: QuantizedTensor) -> Tensor:
    """Return float64 (6,): the `SUMS` of an operand and what it was quantized to, then the operand's largest magnitude.

    ``signal`` is the sum of x^2, ``noise`` that of (x - dequantized)^2. ``nonzero`` counts the elements before rounding
    that are not zero (after the Hadamard transform, where the quantizer has one), ``flushed`` those of them that became
    zero, ``saturated`` those that were cut to the largest value of their block.

    Args:
        x: the operand as it came in, of the shape that `q` has.
        q: any quantization of it.
    """
    if x.numel() == 0:
        return torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=x.device)
    spec, given = q.spec, x.float()
    before = hadamard_transform(given, spec, dim=q.dim).movedim(q.dim, -1)
    after = q.unscaled_values()
    if q.tensor_scale is not None:
        after = after * expand_scale(q.tensor_scale, q.block_scale.shape, spec, q.length)
    noise = given - q.dequantize() if spec.hadamard else before - after
    cut = _is_largest(q) & (before.abs() > after.abs())
    nonzero = before != 0
    counts = (cut, nonzero & (after == 0), nonzero)
    sums = [part.square().sum(dtype=torch.float64) for part in (given, noise)]
    return torch.stack([*sums, *(count.sum().double() for count in counts), given.abs().amax().double()])


def _is_largest(q: QuantizedTensor) -> Tensor:
    """Return where a code has the element's largest magnitude, in the layout of codes."""
    element = ELEMENTS[q.spec.element or ""]
    if element.kind == "fixed":
        return q.codes.abs() == element.max_code
    codes = unpack_nibbles(q.codes, q.length) if element.bits == 4 else q.codes
    return (codes & ((1 << (element.bits - 1)) - 1)) == element.max_code


def _seed(numerics: LayerNumerics, operand: str) -> int | Tensor:
    spec = getattr(numerics.gemm, operand)
    return numerics.seed(operand) if spec is not None and spec.rounding == STOCHASTIC else 0

"""Which TE recipe and which TE quantizers are a `GemmRecipe`: plain data, made without TE.

In TE every tensor of a linear layer has a rowwise plane, quantized along features, and a columnwise one, along tokens
(of a weight, along outputs)::

    tensor        rowwise plane          columnwise plane
    input         fprop_input            wgrad_input
    weight        fprop_weight           dgrad_weight
    grad_output   dgrad_grad_output      wgrad_grad_output

Source: TransformerEngine 2.20, pytorch/quantization.py, pytorch/tensor/hybrid_tensor.py, common/recipe/__init__.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_nvfp4.formats.block import FOUR_OVER_SIX_SCALE_MAX, FP8_BLOCK, HADAMARD_SIGNS, MXFP8
from lightning_nvfp4.formats.element import E4M3
from lightning_nvfp4.formats.rounding import NEAREST, STOCHASTIC
from lightning_nvfp4.recipe import PRESETS, GemmRecipe, QuantSpec

TENSORS: dict[str, tuple[str, str]] = {
    "input": ("fprop_input", "wgrad_input"),
    "weight": ("fprop_weight", "dgrad_weight"),
    "grad_output": ("dgrad_grad_output", "wgrad_grad_output"),
}
"""TE's name of a tensor -> the operands of its rowwise and columnwise plane."""

ROWS = FP8_BLOCK.length
"""Rows of an expert, and of a layer's input, are padded with zeros to a multiple of this; enough for every format."""

_FEATURES = {"fp8_block": 16, "mxfp8": MXFP8.length, "nvfp4": MXFP8.length}
"""What the dims of a weight have to be a multiple of."""


@dataclass(frozen=True)
class QuantizerPlan:
    """One quantizer: a class of TE's (or of ours, which derive from TE's) and the arguments it is made with.

    Attributes:
        kind: name of the class.
        fields: keyword arguments, every one explicit; enums by name.
        parts: of a ``HybridQuantizer``, the quantizers of the rowwise and of the columnwise plane.
        spec: of any other, the format of its planes; ``None`` is BF16.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[QuantizerPlan, QuantizerPlan] | None = None
    spec: QuantSpec | None = None

    def text(self) -> str:
        """Return the plan in one line, for tables."""
        words = [f"{name}={value}" for name, value in self.fields.items()]
        if self.parts:
            words = [f"row={self.parts[0].text()}", f"column={self.parts[1].text()}", *words]
        return f"{self.kind}({', '.join(words)})"


@functools.cache
def builtin(gemm: GemmRecipe) -> str | None:
    """Return the name of TE's built-in recipe with these numerics, which its fused paths take; ``None`` if none has."""
    names = {"fp8": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}
    return next((te for preset, te in names.items() if PRESETS[preset].gemms["linear"] == gemm), None)


@functools.cache
def quantizers(gemm: GemmRecipe) -> dict[str, QuantizerPlan]:
    """Return the quantizer of each tensor, by TE's name of it, for a recipe whose `uncovered` is ``None``."""
    plans = {}
    for tensor, names in TENSORS.items():
        row, column = (getattr(gemm, name) for name in names)
        source = "original"
        if tensor != "grad_output" and gemm.source == "dequantized" and row is not None:
            source = "rowwise_dequantized"
        # One kernel of TE's makes both planes; another source, or our rounding, needs the planes apart.
        if row == column and source == "original" and (row is None or row.rounding == NEAREST):
            plans[tensor] = _leaf(row, True, True)
        else:
            parts = (_leaf(row, True, False), _leaf(column, False, True))
            plans[tensor] = QuantizerPlan("HybridQuantizer", {"columnwise_source": source}, parts)
    return plans


def builtin_quantizers(gemm: GemmRecipe) -> dict[str, QuantizerPlan]:
    """Return the quantizers that TE's own recipe makes for a recipe whose `builtin` is not ``None``."""
    plans = {}
    for tensor, names in TENSORS.items():
        row, column = (getattr(gemm, name) for name in names)
        fields = dict(_leaf(row, True, True).fields)
        if row.format == "nvfp4":
            fields |= {"with_rht": bool(column.hadamard), "with_post_rht_amax": bool(column.hadamard)}
        plans[tensor] = QuantizerPlan(_leaf(row, True, True).kind, fields)
    return plans


def planned(gemm: GemmRecipe) -> dict[str, QuantizerPlan]:
    """Return the quantizer of each tensor, those of TE's built-in recipe where there is one."""
    return quantizers(gemm) if builtin(gemm) is None else builtin_quantizers(gemm)


def uncovered(gemm: GemmRecipe, shape: tuple[int, ...] = ()) -> str | None:
    """Return why TE cannot run these numerics on a weight of this shape, or ``None``.

    Args:
        gemm: the numerics.
        shape: (N, K) or (E, N, K) of the weight; empty to leave sizes out.
    """
    if builtin(gemm) is None:
        for tensor, names in TENSORS.items():
            for name, columnwise in zip(names, (False, True), strict=True):
                reason = _no_leaf(getattr(gemm, name), tensor, columnwise)
                if reason:
                    return f"{name}: {reason}"
        for a, b in (
            ("fprop_input", "fprop_weight"),
            ("dgrad_grad_output", "dgrad_weight"),
            ("wgrad_grad_output", "wgrad_input"),
        ):
            formats = [spec.format if spec else "bf16" for spec in (getattr(gemm, a), getattr(gemm, b))]
            if formats[0] != formats[1]:
                return f"{a} is {formats[0]} and {b} is {formats[1]}, and its GEMMs take operands of one format"
    multiple = max((_FEATURES[name] for name in gemm.formats()), default=1)
    for size in shape[-2:]:
        if size % multiple:
            return (
                f"its GEMMs need dims that are multiples of {multiple}, and the weight is {' x '.join(map(str, shape))}"
            )
    return None


def _no_leaf(spec: QuantSpec | None, tensor: str, columnwise: bool) -> str | None:
    if spec is None:
        return None
    if spec.format not in _FEATURES:
        return f"it has no {spec.format} GEMM"
    if spec.format == "nvfp4":
        if spec.hadamard and (spec.hadamard != len(HADAMARD_SIGNS) or spec.hadamard_signs is not None):
            return f"its random Hadamard transform has length {len(HADAMARD_SIGNS)} and its own signs"
        if spec.hadamard and not columnwise:
            return "it transforms operands of wgrad only"
        if spec.tensor_scale == "row" and (columnwise or spec.block != (1, 16) or spec.rounding == STOCHASTIC):
            return "its row-scaled NVFP4 is for the forward, in blocks of 1x16, to nearest"
        return None
    if spec.hadamard:
        return f"it has no Hadamard transform for {spec.format}"
    if spec.format == "mxfp8" and spec.scale_rule != "ceil":
        return "its E8M0 scales follow the ceil rule"
    if spec.rounding == STOCHASTIC and (spec.format != "mxfp8" or spec.block != (1, 32)):
        return f"it has no stochastic rounding for {spec.format} in blocks of {spec.block}"
    if spec.rounding == STOCHASTIC and tensor != "grad_output":
        return "our stochastic rounding for it is that of gradients"
    return None


def _leaf(spec: QuantSpec | None, rowwise: bool, columnwise: bool) -> QuantizerPlan:
    """Return the quantizer of one plane, or of two of the same spec."""
    planes = {"rowwise": rowwise, "columnwise": columnwise}
    if spec is None:
        return QuantizerPlan("IdentityQuantizer", {"dtype": "bfloat16", **planes})
    element = "kFloat8E5M2" if spec.element == "e5m2" else "kFloat8E4M3"
    rows = spec.block[0] if spec.block else 1
    if spec.format == "mxfp8":
        kind = "StochasticMXFP8Quantizer" if spec.rounding == STOCHASTIC else "MXFP8Quantizer"
        return QuantizerPlan(kind, {"fp8_dtype": element, **planes, "with_2d_quantization": rows > 1}, spec=spec)
    if spec.format == "fp8_block":
        return QuantizerPlan(
            "Float8BlockQuantizer",
            {
                "fp8_dtype": element,
                **planes,
                "amax_epsilon": 0.0,
                "force_pow_2_scales": True,
                "block_scaling_dim": 2 if rows > 1 else 1,
            },
            spec=spec,
        )
    return QuantizerPlan(
        "NVFP4Quantizer",
        {
            "fp4_dtype": "kFloat4E2M1",
            **planes,
            "with_amax_reduction": False,
            "with_rht": bool(spec.hadamard),
            "with_post_rht_amax": bool(spec.hadamard),
            "with_2d_quantization": rows > 1,
            "stochastic_rounding": spec.rounding == STOCHASTIC,
            "row_scaled_nvfp4": spec.tensor_scale == "row",
            "nvfp4_use_4over6": spec.four_over_six is not None,
            "nvfp4_e4m3_max": int(FOUR_OVER_SIX_SCALE_MAX if spec.four_over_six else E4M3.max),
            "nvfp4_4over6_err_mode": (spec.four_over_six or "mae").upper(),
            "with_random_sign_mask": True,
        },
        spec=spec,
    )

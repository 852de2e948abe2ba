"""The three quantized GEMMs of a linear layer as one autograd function, for one weight or a stack of experts.

Shapes: R rows (tokens, sorted by expert, each expert's count in `counts`), E experts, N outputs, K inputs.
A plain linear is the case E = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion

from lightning_nvfp4.formats.rounding import STOCHASTIC
from lightning_nvfp4.nn.context import LayerNumerics
from lightning_nvfp4.nn.operands import Operand, along_features, along_tokens, operand_dtype, per_expert_scales
from lightning_nvfp4.nn.saved import load, save
from lightning_nvfp4.ops import (
    Groups,
    QuantizedTensor,
    quantize_values,
    quantize_values_twice,
    quantize_with_values,
    requantize_values,
    rows_matmul,
    tokens_matmul,
)
from lightning_nvfp4.ops.te import layers as te_layers
from lightning_nvfp4.recipe import GemmRecipe, QuantSpec

Seeds = dict[str, int | Tensor]
COMPILES = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch.compile traces these layers; graphs of torch 2.11 gave zeros for their gradients."""
Segments = tuple[tuple[int, int, int], ...]


def grouped_linear(
    x_RK: Tensor,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    counts: Sequence[int] | Groups,
    numerics: LayerNumerics,
    out_dtype: torch.dtype,
    codes: QuantizedTensor | None = None,
    segments: Segments | None = None,
) -> Tensor:
    """Return ``x @ w[e]^T + bias[e]`` for the rows of each expert, in the layer's numerics.

    Args:
        x_RK: activations; rounded to BF16 first, which is what a GEMM in mixed precision sees.
        w_ENK: FP32 master weights (a view with the dims in this order), read directly by the quantizer.
        bias_EN: added in FP32 before the one rounding to `out_dtype`.
        counts: rows of each expert, in order. With more than one expert each is a multiple of the recipe's blocks along
            tokens (`nn.experts` pads).
        numerics: quantizers, seeds and backend of the layer.
        out_dtype: dtype of the result and, in backward, of the input's gradient if the input is of it.
        codes: x already quantized as the recipe's `fprop_input`; x then only carries the gradient.
        segments: first row, end and number of parts of the rows, multiples of the recipe's blocks along tokens, whose
            gradients are rounded with seeds of their own. Only for formats without tensor scale.

    Returns:
        (R, N) of `out_dtype`. Gradients: of x in x's dtype, of w and bias in theirs, accumulated in FP32.
    """
    groups = Groups.of(counts)
    if numerics.native and codes is None and segments is None and _is_native(x_RK, numerics):
        y_RN = _native(x_RK, w_ENK, bias_EN, groups, numerics, out_dtype)
    elif torch.is_grad_enabled() and (x_RK.requires_grad or w_ENK.requires_grad):
        y_RN = _GroupedLinear.apply(x_RK, w_ENK, bias_EN, groups, numerics, out_dtype, codes, segments)
    else:
        with torch.autocast(x_RK.device.type, enabled=False):
            gemm = numerics.effective()
            _, x = _forward_input(x_RK, codes, gemm, numerics, groups, packed=False)
            y_RN = _fprop(x, _inference_weight(w_ENK, gemm, numerics), bias_EN, groups, numerics, out_dtype)
    if numerics.context.observer is not None:
        numerics.context.observer.watch(x_RK if codes is None else None, w_ENK, y_RN, groups, numerics)
    return y_RN


if not COMPILES:
    grouped_linear = torch.compiler.disable(grouped_linear)  # pyright: ignore[reportAssignmentType]


def _is_native(x_RK: Tensor, numerics: LayerNumerics) -> bool:
    """Return whether Transformer Engine multiplies this input: not on a CPU, not BF16 operands, not no rows."""
    return x_RK.is_cuda and len(x_RK) > 0 and bool(numerics.effective().formats())


def _native(
    x_RK: Tensor,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    groups: Groups,
    numerics: LayerNumerics,
    out_dtype: torch.dtype,
) -> Tensor:
    gemm = numerics.effective()
    layer = numerics.context.te_layers.of(numerics.index, gemm, tuple(w_ENK.shape), bias_EN is not None)
    seed = _seed(numerics, gemm, "dgrad_grad_output")
    return te_layers.grouped_linear(x_RK, w_ENK, bias_EN, groups, layer, seed, out_dtype)  # pyright: ignore[reportCallIssue]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RK: Tensor,
        w_ENK: Tensor,
        bias_EN: Tensor | None,
        groups: Groups,
        numerics: LayerNumerics,
        out_dtype: torch.dtype,
        codes: QuantizedTensor | None,
        segments: Segments | None,
    ) -> Tensor:
        with torch.autocast(x_RK.device.type, enabled=False):
            gemm = numerics.effective()
            # What the backward starts from is kept as packed codes; a weight's original is there anyway.
            packed = gemm.source == "dequantized"
            x_codes, x = _forward_input(x_RK, codes, gemm, numerics, groups, packed and ctx.needs_input_grad[1])
            w_codes, w = _forward_weight(w_ENK, gemm, numerics, packed)
            y = _fprop(x, w, bias_EN, groups, numerics, out_dtype)
            saved_x = None
            if ctx.needs_input_grad[1]:
                saved_x = _saved_input(x_RK, gemm, numerics, groups) if x_codes is None else x_codes
        ctx.gemm, ctx.numerics, ctx.groups, ctx.step_seeds = gemm, numerics, groups, _seeds(numerics, gemm)
        ctx.segments = None if segments is None else _seeded(segments, numerics, gemm)
        ctx.saved_forward_input = x_codes is not None
        ctx.x_dtype, ctx.w_dtype = x_RK.dtype, w_ENK.dtype
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
        save(ctx, saved_x, w_ENK if w_codes is None else w_codes)
        return y

    @staticmethod
    @once_differentiable  # the rounding has no second derivative: an error, not a gradient without these layers
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RN,) = grad_outputs
        gemm, groups, numerics, seeds = ctx.gemm, ctx.groups, ctx.numerics, ctx.step_seeds
        saved_x, saved_w = load(ctx)
        dx = dw = dbias = None
        with torch.autocast(dy_RN.device.type, enabled=False):
            dy_RN = dy_RN.to(torch.bfloat16)
            along_n, along_r = _grad_operands(dy_RN, gemm, seeds, groups, numerics, ctx.needs_input_grad, ctx.segments)
            if along_n is not None:
                w = _backward_weight(saved_w, gemm, numerics, seeds)
                dx = rows_matmul(
                    along_n.values,
                    w.values,
                    groups,
                    transposed=False,
                    row_scale=along_n.scale,
                    column_scale=w.scale,
                    dtype=ctx.x_dtype,
                    backend=numerics.backend,
                )
            if along_r is not None:
                x = _backward_input(saved_x, ctx.saved_forward_input, gemm, seeds, groups, numerics.backend)
                dw = tokens_matmul(
                    along_r.values,
                    x.values,
                    groups,
                    row_scale=along_r.scale,
                    column_scale=x.scale,
                    backend=numerics.backend,
                ).to(ctx.w_dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                dbias = _bias_grad(dy_RN, groups, numerics.backend).to(ctx.bias_dtype)
        return dx, dw, dbias, None, None, None, None, None


def _seeds(numerics: LayerNumerics, gemm: GemmRecipe) -> Seeds:
    names = ("dgrad_grad_output", "dgrad_weight", "wgrad_grad_output", "wgrad_input")
    return {name: _seed(numerics, gemm, name) for name in names}


def _seed(numerics: LayerNumerics, gemm: GemmRecipe, operand: str) -> int | Tensor:
    """Return the operand's seed; rounding to nearest needs none, and deriving one takes a while in Python."""
    spec: QuantSpec | None = getattr(gemm, operand)
    return numerics.seed(operand) if spec is not None and spec.rounding == STOCHASTIC else 0


def _forward_input(
    x_RK: Tensor,
    codes: QuantizedTensor | None,
    gemm: GemmRecipe,
    numerics: LayerNumerics,
    groups: Groups,
    packed: bool,
) -> tuple[QuantizedTensor | None, Operand]:
    if codes is not None:
        assert codes.spec == gemm.fprop_input and gemm.source == "dequantized"
        return codes if packed else None, Operand(codes.operand(operand_dtype(x_RK)), codes.tensor_scale)
    if gemm.fprop_input is None:
        return None, Operand.bf16(x_RK)
    seed = _seed(numerics, gemm, "fprop_input")
    tokens = along_features(x_RK.to(torch.bfloat16), gemm.fprop_input, seed, groups, numerics.backend)
    return tokens.both() if packed else (None, tokens.operand())


def _forward_weight(
    w_ENK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics, packed: bool
) -> tuple[QuantizedTensor | None, Operand]:
    spec = gemm.fprop_weight
    if spec is None:
        return None, Operand.bf16(w_ENK)
    dtype = operand_dtype(w_ENK)
    arguments: dict[str, Any] = {
        "seed": _seed(numerics, gemm, "fprop_weight"),
        "backend": numerics.backend,
        "dtype": dtype,
    }
    if not packed:
        values, scale = quantize_values(w_ENK, spec, **arguments)
        return None, Operand(values, _by_expert(scale, w_ENK))
    q = numerics.context.weights.get(numerics.index, w_ENK, spec)
    if q is None:
        q, values = quantize_with_values(w_ENK, spec, **arguments)
        numerics.context.weights.put(numerics.index, w_ENK, spec, q)
    else:
        values = q.operand(dtype)
    return q, Operand(values, _by_expert(q.tensor_scale, w_ENK))


def _inference_weight(w_ENK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics) -> Operand:
    cache = numerics.context.weight_cache
    if cache is None:
        return _forward_weight(w_ENK, gemm, numerics, packed=False)[1]
    if numerics.index not in cache:
        operand = _forward_weight(w_ENK, gemm, numerics, packed=False)[1]
        cache[numerics.index] = (operand.values, operand.scale)
    return Operand(*cache[numerics.index])


def _by_expert(scale: Tensor | None, w_ENK: Tensor) -> Tensor | None:
    """Return a weight's tensor scale as (E, 1), or (E, N) where each of its rows has one."""
    return None if scale is None else scale.reshape(len(w_ENK), -1)


def _saved_input(x_RK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics, groups: Groups) -> QuantizedTensor | Tensor:
    """Return what wgrad needs of the original input, in as few bytes as its numerics allow."""
    x_RK = x_RK.to(torch.bfloat16)
    if gemm.wgrad_input is None:
        return x_RK
    seed = _seed(numerics, gemm, "wgrad_input")
    return along_tokens(x_RK, gemm.wgrad_input, seed, groups, numerics.backend).packed()


def _fprop(
    x: Operand, w: Operand, bias_EN: Tensor | None, groups: Groups, numerics: LayerNumerics, out_dtype: torch.dtype
) -> Tensor:
    return rows_matmul(
        x.values,
        w.values,
        groups,
        transposed=True,
        row_scale=x.scale,
        column_scale=w.scale,
        bias_EN=bias_EN,
        dtype=out_dtype,
        backend=numerics.backend,
    )


def _grad_operands(
    dy_RN: Tensor,
    gemm: GemmRecipe,
    seeds: Seeds,
    groups: Groups,
    numerics: LayerNumerics,
    needed: tuple[bool, ...],
    segments: Segments | None,
) -> tuple[Operand | None, Operand | None]:
    """Return the output's gradient along N for dgrad and along the rows for wgrad, where they are needed."""
    along_n, along_r, backend = gemm.dgrad_grad_output, gemm.wgrad_grad_output, numerics.backend
    if segments is not None:
        parts = [
            _grad_operands(
                dy_RN[start:end], gemm, dict.fromkeys(seeds, seed), Groups.of((end - start,)), numerics, needed, None
            )
            for start, end, seed in segments
        ]
        first, second = zip(*parts, strict=True) if parts else ((), ())
        return _joined(first, dy_RN) if needed[0] else None, _joined(second, dy_RN) if needed[1] else None
    if needed[0] and needed[1] and along_n is not None and along_r is not None:
        if along_n.tensor_scale == "none" and along_r.tensor_scale == "none":
            seed, dtype = seeds["dgrad_grad_output"], operand_dtype(dy_RN)
            pair = quantize_values_twice(dy_RN, along_n, along_r, seed=seed, backend=backend, dtype=dtype)
            return Operand(pair[0]), Operand(pair[1])
    first = second = None
    if needed[0]:
        first = Operand.bf16(dy_RN)
        if along_n is not None:
            first = along_features(dy_RN, along_n, seeds["dgrad_grad_output"], groups, backend).operand()
    if needed[1]:
        second = Operand.bf16(dy_RN)
        if along_r is not None:
            second = along_tokens(dy_RN, along_r, seeds["wgrad_grad_output"], groups, backend).operand()
    return first, second


def _seeded(segments: Segments, numerics: LayerNumerics, gemm: GemmRecipe) -> Segments | None:
    """Return the segments with a seed in the place of each number; ``None`` if nothing is drawn for gradients."""
    specs = [spec for spec in (gemm.dgrad_grad_output, gemm.wgrad_grad_output) if spec is not None]
    if not any(spec.rounding == STOCHASTIC for spec in specs) or any(spec.tensor_scale != "none" for spec in specs):
        return None
    return tuple((start, end, numerics.segment_seed("dgrad_grad_output", n)) for start, end, n in segments)


def _joined(parts: Sequence[Operand | None], dy_RN: Tensor) -> Operand:
    """Return operands of parts of the rows, which have no tensor scale, as one."""
    values = [part.values for part in parts if part is not None]
    return Operand(torch.cat(values)) if values else Operand.bf16(dy_RN)


def _backward_weight(
    saved_w: QuantizedTensor | Tensor, gemm: GemmRecipe, numerics: LayerNumerics, seeds: Seeds
) -> Operand:
    """Return the weight along N, (E, N, K)."""
    spec, seed = gemm.dgrad_weight, seeds["dgrad_weight"]
    if spec is None:
        return Operand.bf16(saved_w if isinstance(saved_w, Tensor) else saved_w.dequantize())
    if isinstance(saved_w, QuantizedTensor):
        dtype = operand_dtype(saved_w.codes)
        values, scale = requantize_values(saved_w, spec, dim=-2, seed=seed, backend=numerics.backend, dtype=dtype)
    else:
        dtype = operand_dtype(saved_w)
        values, scale = quantize_values(saved_w, spec, dim=-2, seed=seed, backend=numerics.backend, dtype=dtype)
    return Operand(values, None if scale is None else scale.reshape(len(values), -1))


def _backward_input(
    saved_x: QuantizedTensor | Tensor,
    saved_forward_input: bool,
    gemm: GemmRecipe,
    seeds: Seeds,
    groups: Groups,
    backend: str,
) -> Operand:
    """Return the input along the rows, (R, K).

    What the forward saw of it is rounded to BF16, the dtype of activations, before it is quantized again, as in TE.
    """
    spec = gemm.wgrad_input
    if isinstance(saved_x, Tensor):
        return Operand.bf16(saved_x)
    if not saved_forward_input:
        assert spec is not None
        values = saved_x.operand(operand_dtype(saved_x.codes))
        return Operand(values, per_expert_scales(saved_x.tensor_scale, spec, groups))
    if spec is None:
        return Operand.bf16(saved_x.dequantize())
    if spec.tensor_scale == "none":
        dtype = operand_dtype(saved_x.codes)
        values, _ = requantize_values(
            saved_x,
            spec,
            dim=0,
            seed=seeds["wgrad_input"],
            backend=backend,
            dtype=dtype,
            source=torch.bfloat16,
        )
        return Operand(values)
    return along_tokens(saved_x.dequantize(torch.bfloat16), spec, seeds["wgrad_input"], groups, backend).operand()


def _bias_grad(dy_RN: Tensor, groups: Groups, backend: str) -> Tensor:
    """Return the sums over the rows of each expert, (E, N) float32."""
    if groups.num == 1:
        return dy_RN.sum(0, dtype=torch.float32).unsqueeze(0)
    ones = torch.ones(len(dy_RN), 1, dtype=operand_dtype(dy_RN), device=dy_RN.device)
    return tokens_matmul(dy_RN.to(ones.dtype), ones, groups, backend=backend).squeeze(-1)

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

from lightning_nvfp4.nn.context import LayerNumerics
from lightning_nvfp4.nn.operands import Operand, along_features, along_tokens, per_expert_scales
from lightning_nvfp4.ops import QuantizedTensor, apply_tensor_scales, matmul, quantize, quantize_values
from lightning_nvfp4.recipe import GemmRecipe, QuantSpec


def grouped_linear(
    x_RK: Tensor,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    counts: Sequence[int],
    numerics: LayerNumerics,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return ``x @ w[e]^T + bias[e]`` for the rows of each expert, in the layer's numerics.

    Args:
        x_RK: activations; rounded to BF16 first, which is what a GEMM in mixed precision sees.
        w_ENK: FP32 master weights (a view with the dims in this order), read directly by the quantizer.
        bias_EN: added in FP32 before the one rounding to `out_dtype`.
        counts: rows of each expert, in order; their sum is R. With more than one expert each is a multiple of the
            recipe's blocks along tokens (`nn.experts` pads).
        numerics: quantizers, seeds and backend of the layer.
        out_dtype: dtype of the result and, in backward, of the input's gradient if the input is of it.

    Returns:
        (R, N) of `out_dtype`. Gradients: of x in x's dtype, of w and bias in theirs, accumulated in FP32.
    """
    counts = tuple(counts)
    if torch.is_grad_enabled() and (x_RK.requires_grad or w_ENK.requires_grad):
        return _GroupedLinear.apply(x_RK, w_ENK, bias_EN, counts, numerics, out_dtype)
    with torch.autocast(x_RK.device.type, enabled=False):
        gemm = numerics.effective()
        x = _forward_input(x_RK, gemm, numerics, counts, packed=False)
        return _fprop(_operand(x), _cached_weight(w_ENK, gemm, numerics), bias_EN, counts).to(out_dtype)


def tokens_alignment(gemm: GemmRecipe) -> int:
    """Return the multiple to which an expert's rows are padded, so that no block along tokens spans two experts."""
    specs = (gemm.wgrad_grad_output, gemm.wgrad_input)
    return max([max(spec.block[1], spec.hadamard or 0) for spec in specs if spec and spec.block], default=1)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RK: Tensor,
        w_ENK: Tensor,
        bias_EN: Tensor | None,
        counts: tuple[int, ...],
        numerics: LayerNumerics,
        out_dtype: torch.dtype,
    ) -> Tensor:
        with torch.autocast(x_RK.device.type, enabled=False):
            gemm = numerics.effective()
            # What the backward starts from is kept as packed codes; a weight's original is there anyway.
            packed = gemm.source == "dequantized"
            x = _forward_input(x_RK, gemm, numerics, counts, packed)
            w = _forward_weight(w_ENK, gemm, numerics, packed)
            y = _fprop(_operand(x), _operand(w), bias_EN, counts).to(out_dtype)
            saved_x = _saved_input(x, x_RK, gemm, numerics, counts) if ctx.needs_input_grad[1] else None
            saved_w = w if isinstance(w, QuantizedTensor) else w_ENK
        ctx.gemm, ctx.numerics, ctx.counts, ctx.step_seeds = gemm, numerics, counts, _seeds(numerics)
        ctx.saved_forward_input = isinstance(x, QuantizedTensor)
        ctx.x_dtype, ctx.w_dtype = x_RK.dtype, w_ENK.dtype
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
        _save(ctx, saved_x, saved_w)
        return y

    @staticmethod
    @once_differentiable  # the rounding has no second derivative: an error, not a gradient without these layers
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RN,) = grad_outputs
        gemm, counts, backend, seeds = ctx.gemm, ctx.counts, ctx.numerics.backend, ctx.step_seeds
        saved_x, saved_w = _load(ctx)
        dx = dw = dbias = None
        with torch.autocast(dy_RN.device.type, enabled=False):
            dy_RN = dy_RN.to(torch.bfloat16)
            if ctx.needs_input_grad[0]:
                dx = _dgrad(dy_RN, saved_w, gemm, seeds, counts, backend).to(ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                if ctx.saved_forward_input:
                    saved_x = saved_x.dequantize()
                dw = _wgrad(dy_RN, saved_x, gemm, seeds, counts, backend).to(ctx.w_dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                dbias = torch.stack([part.float().sum(0) for part in dy_RN.split(list(counts))]).to(ctx.bias_dtype)
        return dx, dw, dbias, None, None, None


def _seeds(numerics: LayerNumerics) -> dict[str, int]:
    names = ("dgrad_grad_output", "dgrad_weight", "wgrad_grad_output", "wgrad_input")
    return {name: numerics.seed(name) for name in names}


def _forward_input(
    x_RK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics, counts: Sequence[int], packed: bool
) -> QuantizedTensor | Operand:
    if gemm.fprop_input is None:
        return Operand.bf16(x_RK)
    seed = numerics.seed("fprop_input")
    tokens = along_features(x_RK.to(torch.bfloat16), gemm.fprop_input, seed, counts, numerics.backend)
    return tokens.packed() if packed else tokens.operand()


def _forward_weight(
    w_ENK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics, packed: bool
) -> QuantizedTensor | Operand:
    if gemm.fprop_weight is None:
        return Operand.bf16(w_ENK)
    seed, backend = numerics.seed("fprop_weight"), numerics.backend
    if packed:
        return quantize(w_ENK, gemm.fprop_weight, dim=-1, seed=seed, backend=backend)
    return Operand(*quantize_values(w_ENK, gemm.fprop_weight, dim=-1, seed=seed, backend=backend))


def _cached_weight(w_ENK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics) -> Operand:
    cache = numerics.context.weight_cache
    if cache is None:
        return _operand(_forward_weight(w_ENK, gemm, numerics, packed=False))
    if numerics.index not in cache:
        operand = _operand(_forward_weight(w_ENK, gemm, numerics, packed=False))
        cache[numerics.index] = (operand.values, operand.scale)
    return Operand(*cache[numerics.index])


def _operand(x: QuantizedTensor | Operand) -> Operand:
    return x if isinstance(x, Operand) else Operand.of(x)


def _saved_input(
    x: QuantizedTensor | Operand, x_RK: Tensor, gemm: GemmRecipe, numerics: LayerNumerics, counts: Sequence[int]
) -> QuantizedTensor | Tensor:
    """Return what wgrad needs of the input, in as few bytes as its numerics allow."""
    if isinstance(x, QuantizedTensor):
        return x
    x_RK = x_RK.to(torch.bfloat16)
    if gemm.wgrad_input is None:
        return x_RK
    return along_tokens(x_RK, gemm.wgrad_input, numerics.seed("wgrad_input"), counts, numerics.backend).packed()


def _fprop(x: Operand, w: Operand, bias_EN: Tensor | None, counts: Sequence[int]) -> Tensor:
    y_RN = _per_expert(x, w, counts)
    if bias_EN is None:
        return y_RN
    return y_RN + _rows(bias_EN.float(), counts)


def _dgrad(
    dy_RN: Tensor,
    saved_w: QuantizedTensor | Tensor,
    gemm: GemmRecipe,
    seeds: dict[str, int],
    counts: Sequence[int],
    backend: str,
) -> Tensor:
    if gemm.dgrad_grad_output is None:
        dy = Operand.bf16(dy_RN)
    else:
        seed = seeds["dgrad_grad_output"]
        dy = along_features(dy_RN, gemm.dgrad_grad_output, seed, counts, backend).operand()
    w_ENK = saved_w if isinstance(saved_w, Tensor) else saved_w.dequantize()
    if gemm.dgrad_weight is None:
        w = Operand.bf16(w_ENK.transpose(-1, -2))
    else:
        w = Operand(*quantize_values(w_ENK, gemm.dgrad_weight, dim=-2, seed=seeds["dgrad_weight"], backend=backend))
    return _per_expert(dy, w, counts)


def _wgrad(
    dy_RN: Tensor,
    saved_x: QuantizedTensor | Tensor,
    gemm: GemmRecipe,
    seeds: dict[str, int],
    counts: Sequence[int],
    backend: str,
) -> Tensor:
    if gemm.wgrad_grad_output is None:
        dy = Operand.bf16(dy_RN.T)
    else:
        seed = seeds["wgrad_grad_output"]
        dy = _over_tokens(dy_RN, gemm.wgrad_grad_output, seed, counts, backend)
    if gemm.wgrad_input is None:
        assert isinstance(saved_x, Tensor)
        x = Operand.bf16(saved_x.T)
    elif isinstance(saved_x, QuantizedTensor):
        x = per_expert_scales(Operand.of(saved_x), gemm.wgrad_input, counts)
    else:
        x = _over_tokens(saved_x, gemm.wgrad_input, seeds["wgrad_input"], counts, backend)
    dw_ENK = dy.values.new_empty(len(counts), dy.values.shape[0], x.values.shape[0])
    start = 0
    for e, count in enumerate(counts):
        # One expert owns all columns, the zeros that complete a Hadamard transform included.
        part = slice(start, start + count) if len(counts) > 1 else slice(None)
        dw = matmul(dy.values[:, part], x.values[:, part])
        rows = None if dy.scale is None else dy.scale[:, e, None]
        dw_ENK[e] = apply_tensor_scales(dw, rows, None if x.scale is None else x.scale[:, e])
        start += count
    return dw_ENK


def _over_tokens(x_RK: Tensor, spec: QuantSpec, seed: int, counts: Sequence[int], backend: str) -> Operand:
    return per_expert_scales(along_tokens(x_RK, spec, seed, counts, backend).operand(), spec, counts)


def _per_expert(x: Operand, w: Operand, counts: Sequence[int]) -> Tensor:
    """Return ``x @ w[e]^T`` in FP32, tensor scales in the epilogue."""
    w_ENK = w.values if w.values.dim() == 3 else w.values.unsqueeze(0)
    parts = [matmul(part, w_ENK[e]) for e, part in enumerate(x.values.split(list(counts))) if len(part)]
    y_RN = torch.cat(parts) if parts else x.values.new_zeros(0, w_ENK.shape[1])
    # (E, 1), or (E, N) where the weight has a scale for each of its rows.
    w_scale = None if w.scale is None else _rows(w.scale.reshape(len(w_ENK), -1), counts)
    return apply_tensor_scales(y_RN, x.scale, w_scale)


def _rows(per_expert: Tensor, counts: Sequence[int]) -> Tensor:
    """Repeat a row per expert (E, n) to one per token (R, n)."""
    if len(counts) == 1:
        return per_expert
    return torch.repeat_interleave(per_expert, torch.tensor(counts, device=per_expert.device), dim=0)


def _save(ctx: Any, *values: QuantizedTensor | Tensor | None) -> None:
    """Hand every tensor to autograd, so that saved-tensor hooks (recompute, offload) see packed codes and scales."""
    layout, tensors = [], []
    for value in values:
        if isinstance(value, QuantizedTensor):
            parts = value.tensors()
            layout.append((value.meta, len(parts)))
            tensors.extend(parts)
        else:
            layout.append((None, 1))
            tensors.append(value)
    ctx.layout = layout
    ctx.save_for_backward(*tensors)


def _load(ctx: Any) -> list[Any]:
    saved, values, start = ctx.saved_tensors, [], 0
    for meta, count in ctx.layout:
        parts = saved[start : start + count]
        values.append(parts[0] if meta is None else QuantizedTensor.from_tensors(meta, parts))
        start += count
    return values

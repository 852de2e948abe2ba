"""The experts function registered with transformers' experts interface: one forward for every MoE architecture.

Shapes: T tokens, S = top-k choices of a token, D hidden size, R rows after the permutation (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightning_nvfp4.comm.expert_parallel import ExpertRows
from lightning_nvfp4.nn.context import LayerNumerics
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.nn.linear import compute_dtype
from lightning_nvfp4.ops import Groups, QuantizedTensor, has_kernels
from lightning_nvfp4.ops.rows import TokenSum, sum_rows

EXPERTS_IMPLEMENTATION = "block_scaled"


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor | ExpertRows, top_k_weights: Tensor | None
) -> Tensor:
    """Run the routed experts of one layer in its numerics; a layer that was not converted runs as it always did.

    Args:
        module: an experts module of transformers' interface (stacked 3D weights, `has_gate`, `is_transposed`, ...).
        hidden_states: (T, D).
        top_k_index: (T, S) expert of each choice; an index >= the number of experts (expert-parallel sentinel) is
            dropped. `ExpertRows` if `hidden_states` are rows that lie by expert already.
        top_k_weights: (T, S) routing weights, applied in FP32; ``None`` with `ExpertRows`.

    Returns:
        (T, D) in the dtype of `hidden_states`; the rows' outputs, as they lie, for `ExpertRows`.
    """
    layers: tuple[LayerNumerics, LayerNumerics] | None = getattr(module, "block_scaled_numerics", None)
    if layers is None:
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    if isinstance(top_k_index, ExpertRows):
        return _rows_forward(module, hidden_states, top_k_index, layers)
    assert top_k_weights is not None
    alignment = max(layer.tokens_alignment for layer in layers)
    on_device = has_kernels(hidden_states, layers[0].backend) and not layers[0].native
    routing = route(top_k_index, module.num_experts, alignment, on_device=on_device)
    y_RD = _rows_forward(module, _Dispatch.apply(hidden_states, routing), ExpertRows(routing.groups), layers)
    return _Combine.apply(y_RD, top_k_weights, routing).to(hidden_states.dtype)


def _rows_forward(module: Any, x_RD: Tensor, rows: ExpertRows, layers: tuple[LayerNumerics, LayerNumerics]) -> Tensor:
    """Return the experts' outputs (R, D) of rows that are sorted by expert and padded."""
    dtype = compute_dtype(x_RD)
    layers = layers[0].of_part(rows.part), layers[1].of_part(rows.part)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    h = _linear(module, up, x_RD, rows, layers[0], dtype, rows.codes)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y_RD = _linear(module, "down_proj", h, rows, layers[1], dtype)
    return module.post_expert_norm(y_RD) if module.has_post_expert_norm else y_RD


@dataclass(frozen=True)
class Routing:
    """Where each choice of a token stands in the rows that the experts work on.

    Attributes:
        groups: padded rows of each expert.
        rows: int64 (T, S), the row of each choice; R for a choice without expert.
        live: bool (T, S), false for a choice without expert; ``None`` if all have one.
        choices: int64 (R,), flat (token * S + choice) of each row, -1 where the row is padding.
    """

    groups: Groups
    rows: Tensor
    live: Tensor | None
    choices: Tensor


def route(top_k_index: Tensor, num_experts: int, alignment: int, on_device: bool) -> Routing:
    """Sort the routed choices by expert, equal ids in token order, and pad each expert's rows.

    Args:
        top_k_index: (T, S) integer expert ids; ids >= `num_experts` are left out.
        num_experts: E.
        alignment: each expert's number of rows is padded to a multiple of it; an expert without tokens gets none.
        on_device: leave the counts on the device and take the largest number of rows that they can need, instead of
            waiting for them.
    """
    ids = top_k_index.reshape(-1).to(torch.int64)
    order = torch.argsort(ids, stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    first = torch.searchsorted(ids[order], experts)
    tokens = first.diff()
    padded = (tokens + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    if on_device:
        num_rows = (len(ids) // alignment + min(num_experts, len(ids))) * alignment
        # Rows to spare, all zeros, are the last expert's, so that every row has one.
        offsets = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        offsets[-1] = num_rows
        groups = Groups(num_experts, offsets=offsets)
    else:
        groups = Groups(num_experts, counts=tuple(padded.tolist()))
        num_rows = sum(groups.on_host())
    ranked = ids[order].clamp(max=num_experts - 1)
    # A choice without expert is sent behind the last row, and cut off.
    row_of_rank = torch.arange(len(ids), device=ids.device) - first[ranked] + (ends - padded)[ranked]
    # Not `torch.where`, which copies a number to the device and waits for it.
    row_of_rank = row_of_rank.masked_fill(ids[order] >= num_experts, num_rows)
    choices = ids.new_full((num_rows + 1,), -1).index_copy(0, row_of_rank, order)[:num_rows]
    rows = torch.empty_like(ids).index_copy(0, order, row_of_rank).view(top_k_index.shape)
    live = None if not on_device and int(first[-1]) == len(ids) else rows < num_rows
    return Routing(groups, rows, live, choices)


class _Dispatch(torch.autograd.Function):
    """Rows for the experts (R, D) from tokens (T, D); padding rows are zeros."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        choices = routing.choices
        if not len(x_TD) or not len(choices):
            return x_TD.new_zeros(len(choices), x_TD.shape[1])
        rows = x_TD[choices.clamp(min=0) // routing.rows.shape[1]]
        return rows.masked_fill_((choices < 0).unsqueeze(1), 0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (dx_RD,) = grad_outputs
        return sum_choices(dx_RD, None, ctx.routing, dx_RD.dtype), None


class _Combine(torch.autograd.Function):
    """Tokens (T, D) in FP32 from the rows of the experts (R, D), weighted by the routing weights (T, S)."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_TS: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        ctx.save_for_backward(y_RD, weights_TS)
        return sum_choices(y_RD, weights_TS, routing, torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (dout_TD,) = grad_outputs
        y_RD, weights_TS = ctx.saved_tensors
        routing: Routing = ctx.routing
        choices, dout_TD = routing.choices, dout_TD.float()
        if len(choices):
            dout_RD = dout_TD[choices.clamp(min=0) // weights_TS.shape[1]]
            weight_R = weights_TS.reshape(-1)[choices.clamp(min=0)].float().masked_fill_(choices < 0, 0.0)
            dy_RD = (dout_RD * weight_R.unsqueeze(1)).to(y_RD.dtype)
        else:
            dy_RD = torch.zeros_like(y_RD)
        dweights = [(_rows_of(y_RD, routing, s).float() * dout_TD).sum(-1) for s in range(weights_TS.shape[1])]
        return dy_RD, torch.stack(dweights, dim=1).to(weights_TS.dtype), None


def sum_choices(x_RD: Tensor, weights_TS: Tensor | None, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Return the (weighted) sum of the rows of each token's choices (T, D), added in FP32 in their order.

    A scatter would add in any order.
    """
    if not torch.compiler.is_compiling() and len(x_RD):
        num_rows, every = len(x_RD), torch.arange(len(x_RD), device=x_RD.device)
        rows_TS = routing.rows
        what = TokenSum(x_RD, every, rows_TS.view(-1), slice(0, num_rows), weights_TS, rows_TS.shape[1], dtype)
        # Behind the last row, where choices without expert are, stands one of zeros.
        fused = sum_rows(x_RD.new_zeros(1, x_RD.shape[1]), what)
        if fused is not None:
            return fused
    total = None
    for s in range(routing.rows.shape[1]):
        part = _rows_of(x_RD, routing, s).float()
        part = part if weights_TS is None else part * weights_TS[:, s, None].float()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(dtype)


def _rows_of(x_RD: Tensor, routing: Routing, choice: int) -> Tensor:
    """Return the row of each token's choice (T, D); zeros where the choice has no expert."""
    rows = routing.rows[:, choice]
    if not len(x_RD):
        return x_RD.new_zeros(len(rows), x_RD.shape[1])
    if routing.live is None:
        return x_RD[rows]
    return x_RD[rows.clamp(max=len(x_RD) - 1)].masked_fill_(~routing.live[:, choice, None], 0)


def _linear(
    module: nn.Module,
    name: str,
    x: Tensor,
    rows: ExpertRows,
    numerics: LayerNumerics,
    dtype: torch.dtype,
    codes: QuantizedTensor | None = None,
) -> Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    weight = weight.transpose(-1, -2) if module.is_transposed else weight
    return grouped_linear(x, weight, bias, rows.groups, numerics, dtype, codes, rows.segments)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)

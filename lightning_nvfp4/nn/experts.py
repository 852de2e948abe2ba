"""The experts function registered with transformers' experts interface: one forward for every MoE architecture.

Shapes: T tokens, S = top-k choices of a token, D hidden size, R rows after the permutation (padding included).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightning_nvfp4.nn.context import LayerNumerics
from lightning_nvfp4.nn.function import grouped_linear, tokens_alignment
from lightning_nvfp4.nn.linear import compute_dtype

EXPERTS_IMPLEMENTATION = "block_scaled"


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the routed experts of one layer in its numerics; a layer that was not converted runs as it always did.

    Args:
        module: an experts module of transformers' interface (stacked 3D weights, `has_gate`, `is_transposed`, ...).
        hidden_states: (T, D).
        top_k_index: (T, S) expert of each choice; an index >= the number of experts (expert-parallel sentinel) is
            dropped.
        top_k_weights: (T, S) routing weights, applied in FP32.

    Returns:
        (T, D) in the dtype of `hidden_states`.
    """
    layers: tuple[LayerNumerics, LayerNumerics] | None = getattr(module, "block_scaled_numerics", None)
    if layers is None:
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    num_experts, (num_tokens, top_k) = module.num_experts, top_k_index.shape
    alignment = max(tokens_alignment(layer.gemm) for layer in layers)
    counts, slots, rows = permutation(top_k_index, num_experts, alignment)
    x_RD = hidden_states.new_zeros(sum(counts), hidden_states.shape[-1]).index_copy(
        0, rows, hidden_states[slots // top_k]
    )
    dtype = compute_dtype(hidden_states)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    h = _linear(module, up, x_RD, counts, layers[0], dtype)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y_RD = _linear(module, "down_proj", h, counts, layers[1], dtype)
    if module.has_post_expert_norm:
        y_RD = module.post_expert_norm(y_RD)
    weighted = y_RD[rows].float() * top_k_weights.reshape(-1)[slots].unsqueeze(-1).float()
    out = weighted.new_zeros(num_tokens * top_k, y_RD.shape[-1]).index_copy(0, slots, weighted)
    return out.view(num_tokens, top_k, out.shape[-1]).sum(1).to(hidden_states.dtype)


def permutation(top_k_index: Tensor, num_experts: int, alignment: int) -> tuple[list[int], Tensor, Tensor]:
    """Sort the routed choices by expert and pad each expert's rows.

    Args:
        top_k_index: (T, S) integer expert ids; ids >= `num_experts` are left out.
        num_experts: E.
        alignment: each expert's number of rows is padded to a multiple of it; an expert without tokens gets none.

    Returns:
        counts: padded rows of each expert (E entries). slots: flat (token * S + choice) of each live choice, sorted by
        expert, equal ids in token order. rows: the row of each of them in the padded layout.
    """
    ids = top_k_index.reshape(-1)
    tokens = torch.bincount(ids.clamp(max=num_experts), minlength=num_experts + 1)[:num_experts]
    padded = (tokens + alignment - 1) // alignment * alignment
    slots = torch.argsort(ids, stable=True)[: int(tokens.sum())]
    expert = ids[slots]
    within = torch.arange(len(slots), device=ids.device) - (tokens.cumsum(0) - tokens)[expert]
    rows = (padded.cumsum(0) - padded)[expert] + within
    return padded.tolist(), slots, rows


def _linear(
    module: nn.Module, name: str, x: Tensor, counts: Sequence[int], numerics: LayerNumerics, dtype: torch.dtype
) -> Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_linear(
        x, weight.transpose(-1, -2) if module.is_transposed else weight, bias, counts, numerics, dtype
    )


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)

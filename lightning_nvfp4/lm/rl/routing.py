"""Which experts a mixture's routers choose, recorded while a model runs, to compare sampling with training.

Shapes: B rows, T completion tokens, L mixture layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nvfp4.selection import is_experts


class RoutingRecord:
    """The choices of each experts module, call after call, for the last `keep` positions of `num_rows` rows."""

    def __init__(self, num_rows: int, keep: int, num_layers: int) -> None:
        self._num_rows, self._keep = num_rows, keep
        self._layers: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def add(self, layer: int, topk_ids: Tensor) -> None:
        """topk_ids: (num_rows * positions, K), rows outermost."""
        if len(topk_ids) % self._num_rows == 0:
            kept = topk_ids.detach().view(self._num_rows, -1, topk_ids.shape[-1])[:, -self._keep :]
            self._layers[layer].append(kept.to(torch.int16))

    def chosen(self, length: int) -> Tensor | None:
        """The first `length` recorded positions, (B, length, L, K) int16 in ascending order; None if some lack."""
        layers = [torch.cat(calls, dim=1) for calls in self._layers if calls]
        if not layers or len(layers) < len(self._layers) or any(layer.shape[1] < length for layer in layers):
            return None
        return torch.stack([layer[:, :length] for layer in layers], dim=2).sort(dim=-1).values


@contextmanager
def recorded_routing(model: nn.Module, num_rows: int, keep: int) -> Iterator[RoutingRecord]:
    """Record while open. A dense model records nothing, nor does a compiled one, whose graphs hooks would break."""
    modules = [] if _compiled(model) else [module for module in model.modules() if is_experts(module)]
    record = RoutingRecord(num_rows, keep, len(modules))
    handles = [module.register_forward_pre_hook(_hook(record, i), with_kwargs=True) for i, module in enumerate(modules)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _hook(record: RoutingRecord, layer: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Modules of transformers' experts interface are called with (hidden_states, top_k_index, top_k_weights)."""
        record.add(layer, args[1] if len(args) > 1 else kwargs["top_k_index"])

    return hook


def _compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


def routing_agreement(one: Tensor, other: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the share of masked tokens x layers whose sets of experts are equal; sets are (B, T, L, K), sorted."""
    equal = (one == other).all(dim=-1).float().mean(dim=-1)
    return equal.masked_fill(~mask_BT, 0.0).sum() / mask_BT.sum().clamp(min=1)

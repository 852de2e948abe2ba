"""The norm of gradients that lie on several device meshes, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def total_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients, FP32 scalar; sharded gradients count in full, whatever mesh they lie on."""
    return _norm(_by_mesh(parameters))


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients in place so that `total_grad_norm` is at most `max_norm`, and return what it was."""
    meshes = _by_mesh(parameters)
    norm = _norm(meshes)
    for members in meshes.values():
        nn.utils.clip_grads_with_norm_(members, max_norm, norm)
    return norm


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[Any, list[nn.Parameter]]:
    """Group the parameters that have a gradient: one call of torch's takes one mesh."""
    meshes: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            meshes[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    return meshes


def _norm(meshes: dict[Any, list[nn.Parameter]]) -> Tensor:
    norms, parts = [], []
    for members in meshes.values():
        gradients = [p.grad for p in members if p.grad is not None]
        if all(_spread_over_all(gradient) for gradient in gradients):
            local = [gradient.to_local() for gradient in gradients]  # type: ignore[union-attr]
            parts.append(nn.utils.get_total_norm([part for part in local if part.numel()]).to(local[0].device))
            continue
        norm = nn.utils.get_total_norm(gradients)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if parts:
        mine = torch.linalg.vector_norm(torch.stack([part.float() for part in parts])).reshape(1)
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
        norms.append(torch.linalg.vector_norm(torch.cat(ranks)))
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))


def _spread_over_all(gradient: Tensor) -> bool:
    """Return whether every rank has a part of its own: one exchange serves all such gradients."""
    return (
        isinstance(gradient, DTensor)
        and gradient.device_mesh.size() == dist.get_world_size()
        and not any(placement.is_replicate() or placement.is_partial() for placement in gradient.placements)
    )

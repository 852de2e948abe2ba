"""The experts module of a tiny model, and a rank's share of it."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import tiny_model

from lightning_nvfp4 import convert
from lightning_nvfp4.comm.expert_parallel import Communication, CompressedAllToAll

HIDDEN = 64
MODELS: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_experts": 12}, "gpt_oss": {"num_local_experts": 8}}


def experts_of(name: str, precision: str | None, rank: int = 0) -> tuple[Any, Any]:
    """Return a tiny model and its experts; biased, transposed ones of gpt_oss.

    Args:
        name: one of `MODELS`.
        precision: to which every layer is converted, unless ``None``.
        rank: whose random bits the model draws, in the first micro-batch of step 1.
    """
    model = tiny_model(name, **MODELS[name])
    if precision is not None:
        converted = convert(model, precision, overrides={"keep_first_blocks": 0, "keep_last_blocks": 0})
        converted.context.begin(3, rank, step=1, micro_batch=0)
    return model, next(m for m in model.modules() if hasattr(m, "has_gate"))


def spread(experts: Any, mesh: Any, place: int, size: int, communication: Communication) -> CompressedAllToAll:
    """Leave to an experts module the share of one of `size` ranks; return its forward over all of them."""
    experts.num_experts //= size
    for key, parameter in list(experts.named_parameters()):
        setattr(experts, key, torch.nn.Parameter(parameter.detach().chunk(size)[place].clone()))
    return CompressedAllToAll(experts, mesh, None, communication=communication)

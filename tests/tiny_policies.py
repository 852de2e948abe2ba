"""Tiny policies for GRPO, a reward that varies within groups, and what a run of them leaves."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback

from lightning_nvfp4.lm.optim import OptimizerConfig
from lightning_nvfp4.lm.rl.grpo import GRPO


def low_share(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
    """The share of low tokens in each completion."""
    words = [[word for word in text.split() if word[1:].isdecimal()] for text in completions]
    return [sum(int(word[1:]) < 35 for word in row) / max(len(row), 1) for row in words]


def policy(fields: dict[str, Any], **options: Any) -> GRPO:
    """Return a GRPO module of short completions that logs none of them."""
    settings = {
        "model": fields,
        "optimizer": OptimizerConfig(lr=1e-2, weight_decay=0.0),
        "group_size": 8,
        "max_new_tokens": 4,
        "reward": low_share,
        "log_prompts": 0,
    }
    return GRPO(**(settings | options))


def weights(module: torch.nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Trace(Callback):
    """Metrics after every batch, and the weights before every optimizer step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.weights: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.weights.append(weights(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

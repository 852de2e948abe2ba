"""`NonfiniteGuard`: a NaN or infinity in loss or gradients stops, or skips, the step before anything is saved."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_nvfp4.errors import UserError


class NonfiniteGuard(Callback):
    """Look at every gradient before the optimizer does.

    A block with a NaN or infinite element decodes to NaN in every format, so a bad operand anywhere reaches a gradient
    or the loss and is seen here, before the weights change and before a checkpoint is written.

    Args:
        action: ``abort`` ends the run with the names of the first bad parameters; ``skip`` leaves out the step.
        max_skips: with ``skip``, consecutive bad steps that are left out before the run ends.

    Raises:
        UserError: an unknown action; or, during training, non-finite values under the chosen action.
    """

    def __init__(self, action: str = "abort", max_skips: int = 10) -> None:
        if action not in ("abort", "skip") or max_skips < 1:
            raise UserError(f"NonfiniteGuard(action={action!r}, max_skips={max_skips}): abort or skip, and at least 1.")
        self.action, self.max_skips = action, max_skips
        self.skips = 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Check the gradients that the optimizer is about to use."""
        bad = nonfinite_gradients(pl_module)
        if trainer.world_size > 1:
            flag = torch.tensor(float(bool(bad)), device=pl_module.device)
            if bool(trainer.strategy.reduce(flag, reduce_op="sum") > 0) and not bad:
                bad = ["(on another rank)"]
        if not bad:
            self.skips = 0
            return
        where = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        self.skips += 1
        if self.action == "abort" or self.skips > self.max_skips:
            raise UserError(
                f"non-finite gradient at step {trainer.global_step} in {where}: nothing was saved and the weights are "
                "those before the step. Lower the learning rate, look at the data of this step, or skip such steps "
                "with NonfiniteGuard(action='skip')."
            )
        rank_zero_warn(f"step {trainer.global_step} left out: non-finite gradient in {where}")
        for parameter in pl_module.parameters():
            parameter.grad = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the loss, for steps whose gradients hide it."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.action == "abort" and isinstance(loss, torch.Tensor) and not bool(torch.isfinite(loss).all()):
            raise UserError(
                f"non-finite loss at step {trainer.global_step}: look at the data of this step or lower the learning "
                "rate; nothing was saved after it."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consecutive steps left out."""
        return {"skips": self.skips}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of consecutive steps left out."""
        self.skips = int(state_dict["skips"])


def nonfinite_gradients(module: nn.Module) -> list[str]:
    """Return the names of the parameters of `module` whose gradient, or part of one on this rank, is not finite."""
    grads = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    parts = [(name, grad.to_local() if isinstance(grad, DTensor) else grad) for name, grad in grads]
    named = [(name, part) for name, part in parts if part.numel()]
    if not named:
        return []
    # A maximum of magnitudes is finite exactly where every element is; unlike a norm it cannot overflow.
    largest = torch.stack([torch.linalg.vector_norm(g, float("inf")).float().cpu() for _, g in named])
    return [name for (name, _), ok in zip(named, largest.isfinite(), strict=True) if not ok]

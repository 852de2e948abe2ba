"""The progress bar of a run that is measured in steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StepProgressBar(RichProgressBar):
    """Counts steps; runs here are measured in steps, and an epoch is one pass of a loader that has no end."""

    @property
    def total_train_batches(self) -> int | float:
        """The run's steps; Lightning's own number is of those that are left, or of the batches of an epoch."""
        steps = self.trainer.max_steps
        return steps if steps > 0 else super().total_train_batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the steps done, however many batches or updates each has."""
        done = trainer.global_step if trainer.max_steps > 0 else batch_idx + 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, done - 1)

    def _get_train_description(self, current_epoch: int) -> str:
        return "step"

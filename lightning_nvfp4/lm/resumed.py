"""What Lightning forgets when a run goes on."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def remember_saved(trainer: Trainer) -> None:
    """Tell every `ModelCheckpoint` without a monitor that the step at which training starts is saved.

    Lightning starts with step 0. After a resume it would save its step once more when the first micro-batch is done,
    over the good one, without that micro-batch's gradients: the next resume would leave them out.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is None:
            callback._last_global_step_saved = trainer.global_step

"""Callbacks that wait for a metric of validation, in a run that will not validate."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_nvfp4.errors import UserError


def check_monitors(trainer: Trainer) -> None:
    """Refuse, before the first step, to wait in vain.

    Raises:
        UserError: a `ModelCheckpoint` or `EarlyStopping` monitors `val...`, or an `EarlyStopping` looks at any metric
            after validations alone, and nothing is validated, or nothing before the last step.
    """
    waiting = [
        f"{type(call).__name__}.monitor is {call.monitor}"
        + ("" if str(call.monitor).startswith("val") else ", looked at after each validation")
        for call in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(call, EarlyStopping | ModelCheckpoint)
        and (str(call.monitor).startswith("val") or getattr(call, "_check_on_train_epoch_end", None) is False)
    ]
    if not waiting:
        return
    # Where Lightning has not loaded the data, it does so for a later epoch.
    if not trainer.enable_validation or (trainer.val_dataloaders is not None and not sum(trainer.num_val_batches)):
        raise UserError(
            f"{waiting[0]}, and this run validates nothing. Give validation data (data.val_path) and "
            "trainer.limit_val_batches, or take the callback out."
        )
    first = trainer.val_check_batch
    if first is not None and 0 < trainer.max_steps * trainer.accumulate_grad_batches < first < float("inf"):
        raise UserError(
            f"{waiting[0]}, and the first validation would come after {first} batches, when the run of "
            f"trainer.max_steps = {trainer.max_steps} is over. Lower trainer.val_check_interval, or train longer."
        )

"""`SaveOnSigterm`: a run that is asked to end saves the step it has done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn


class SaveOnSigterm(Callback):
    """Save `last.ckpt` when SIGTERM ends training, as schedulers send it before they take a machine away.

    The optimizer step is finished first, with all its micro-batches, for no checkpoint holds gradients; then Lightning
    leaves with exit status 0. The checkpoint lies where the run's `ModelCheckpoint` with `save_last` has its own, else
    in `default_root_dir`; `--ckpt_path last` continues the run, bit for bit. Another run's checkpoint stays: as with a
    `ModelCheckpoint`, the new one is called `last-v1.ckpt` then. `--ckpt_path last` takes the newest.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier fit's signal."""
        self._asked = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Put the end off to the optimizer step."""
        signals = trainer._signal_connector
        self._asked |= signals.received_sigterm
        signals.received_sigterm = self._asked and not trainer.fit_loop._should_accumulate()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save, on every rank."""
        if not isinstance(exception, SIGTERMException) or getattr(trainer, "fast_dev_run", 0):
            return
        path = _last_checkpoint(trainer)
        trainer.save_checkpoint(path)
        if trainer.fit_loop._should_accumulate():
            rank_zero_warn(
                f"{path} lies between the micro-batches of an optimizer step and holds no gradients of the first: the "
                "run that goes on will not be this one to the bit."
            )
        rank_zero_info(f"SIGTERM: saved {path} after step {trainer.global_step}. Go on with --ckpt_path last.")


def _last_checkpoint(trainer: Trainer) -> Path:
    folder = Path(trainer.default_root_dir)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last and callback.dirpath is not None:
            if callback.last_model_path:
                return Path(callback.last_model_path)
            folder = Path(callback.dirpath)
            break
    path, version = folder / f"last{ModelCheckpoint.FILE_EXTENSION}", 0
    resumed = Path(trainer.ckpt_path).resolve() if trainer.ckpt_path else None
    while path.exists() and path.resolve() != resumed:
        version += 1
        path = folder / f"last-v{version}{ModelCheckpoint.FILE_EXTENSION}"
    return trainer.strategy.broadcast(path)  # the first rank may have written before another looks

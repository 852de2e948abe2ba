"""`PrecisionSchedule`: move the forward or backward GEMMs to BF16 late in training, with no change of the weights."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_nvfp4.errors import UserError


class PrecisionSchedule(Callback):
    """Run GEMMs in BF16 from a given step on.

    Moving only the forward GEMMs at 82 % of the steps takes back most of the loss gap of the decay phase
    (arXiv:2509.25149, appendix D). The switch is a pure function of the global step, so a resumed run follows it.

    Args:
        forward_at: first step of BF16 forward GEMMs: a share of the run's steps in [0, 1), or a step; ``None`` never.
            The run's steps are ``max_steps``, or those of ``max_epochs`` where the data have a length.
        backward_at: the same for the backward GEMMs; both may be set.

    Raises:
        UserError: a value out of range; before the first step, a share of a run whose length is not known, or a
            precision that is not block-scaled.
    """

    def __init__(self, forward_at: float | None = 0.82, backward_at: float | None = None) -> None:
        for name, value in (("forward_at", forward_at), ("backward_at", backward_at)):
            if value is not None and not (0 <= value <= 1 or (1 < value < math.inf and value == int(value))):
                raise UserError(f"PrecisionSchedule.{name} = {value!r} must be a share in [0, 1) or a whole step >= 1.")
        self.forward_at, self.backward_at = forward_at, backward_at
        self._num_steps = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the precision, and find out how long the run is where a share of it is asked for."""
        if getattr(trainer.precision_plugin, "context", None) is None:
            raise UserError(
                f"PrecisionSchedule needs a block-scaled precision, but the Trainer has "
                f"precision={trainer.precision!r}: use 'nvfp4-hybrid' or another preset, or remove the callback."
            )
        shares = [at for at in (self.forward_at, self.backward_at) if at is not None and at < 1]
        if not any(shares):
            return
        self._num_steps = trainer.estimated_stepping_batches
        if not 0 < self._num_steps < math.inf:  # -1 of data without a length
            raise UserError(
                f"PrecisionSchedule: a share ({shares[0]!r}) of the steps needs a run whose steps are known, and the "
                f"Trainer has max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}: set Trainer(max_steps="
                "...), or give the first step of BF16 itself (a whole number >= 1)."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the switches for the step that begins."""
        context: Any = trainer.precision_plugin.context  # pyright: ignore[reportAttributeAccessIssue]
        forward = self._reached(self.forward_at, trainer.global_step)
        backward = self._reached(self.backward_at, trainer.global_step)
        if (forward, backward) != (context.forward_high_precision, context.backward_high_precision):
            rank_zero_info(
                f"step {trainer.global_step}: forward GEMMs in {'BF16' if forward else trainer.precision}, "
                f"backward GEMMs in {'BF16' if backward else trainer.precision}"
            )
        context.forward_high_precision, context.backward_high_precision = forward, backward

    def _reached(self, at: float | None, step: int) -> bool:
        return at is not None and step >= (int(at) if at >= 1 else at * self._num_steps)

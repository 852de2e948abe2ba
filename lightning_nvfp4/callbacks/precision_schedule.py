"""`PrecisionSchedule`: move the forward or backward GEMMs to BF16 late in training, with no change of the weights."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_nvfp4.errors import UserError


class PrecisionSchedule(Callback):
    """Run GEMMs in BF16 from a given step on.

    Moving only the forward GEMMs at 82 % of the steps takes back most of the loss gap of the decay phase
    (arXiv:2509.25149, appendix D). The switch is a pure function of the global step, so a resumed run follows it.

    Args:
        forward_at: first step of BF16 forward GEMMs: a share of ``max_steps`` in [0, 1), or a step; ``None`` never.
        backward_at: the same for the backward GEMMs.

    Raises:
        UserError: a value out of range, a share without ``max_steps``, or a precision that is not block-scaled.
    """

    def __init__(self, forward_at: float | None = 0.82, backward_at: float | None = None) -> None:
        for name, value in (("forward_at", forward_at), ("backward_at", backward_at)):
            if value is not None and (value < 0 or (value > 1 and value != int(value))):
                raise UserError(f"PrecisionSchedule.{name} = {value!r} must be a share in [0, 1) or a whole step >= 1.")
        self.forward_at, self.backward_at = forward_at, backward_at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the switches for the step that begins."""
        context = getattr(trainer.precision_plugin, "context", None)
        if context is None:
            raise UserError(
                f"PrecisionSchedule needs a block-scaled precision, but the Trainer has "
                f"precision={trainer.precision!r}: use 'nvfp4-hybrid' or another preset, or remove the callback."
            )
        forward = self._reached(self.forward_at, trainer)
        backward = self._reached(self.backward_at, trainer)
        if (forward, backward) != (context.forward_high_precision, context.backward_high_precision):
            rank_zero_info(
                f"step {trainer.global_step}: forward GEMMs in {'BF16' if forward else trainer.precision}, "
                f"backward GEMMs in {'BF16' if backward else trainer.precision}"
            )
        context.forward_high_precision, context.backward_high_precision = forward, backward

    @staticmethod
    def _reached(at: float | None, trainer: Trainer) -> bool:
        if at is None:
            return False
        if at >= 1:
            return trainer.global_step >= int(at)
        if trainer.max_steps is None or trainer.max_steps <= 0:
            raise UserError(f"PrecisionSchedule: a share ({at!r}) of the steps needs Trainer(max_steps=...): set it.")
        return trainer.global_step >= at * trainer.max_steps

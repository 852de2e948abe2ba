"""Lightning's weight averaging and sharded weights do not go together."""

from __future__ import annotations

from typing import Any

from lightning_nvfp4.errors import UserError


def refuse_averaging(trainer: Any) -> None:
    """Stop before weights are sharded in a run that averages them: the callbacks copy a whole module.

    Raises:
        UserError: the trainer has such a callback (`EMAWeightAveraging`, `StochasticWeightAveraging`).
    """
    for callback in trainer.callbacks:
        if any(base.__name__.endswith("WeightAveraging") for base in type(callback).__mro__):
            raise UserError(
                f"{type(callback).__name__} averages whole weights, and {type(trainer.strategy).__name__} shards them: "
                "take the callback out, or use strategy 'ddp'."
            )

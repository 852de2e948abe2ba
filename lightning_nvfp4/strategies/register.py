"""Makes the strategy's name known to the Trainer of ``lightning`` and of ``pytorch_lightning``."""

from __future__ import annotations

from lightning_nvfp4.strategies.expert_parallel import ExpertParallelMixin, ExpertParallelStrategy

_NAME = ExpertParallelMixin.strategy_name
_DESCRIPTION = "Experts spread over ranks with a compressed all-to-all, FSDP2 for the rest"


def register_lightning() -> None:
    """Register with ``lightning``."""
    from lightning.pytorch.strategies import StrategyRegistry

    StrategyRegistry.register(_NAME, ExpertParallelStrategy, _DESCRIPTION, override=True)


def register_pytorch_lightning() -> None:
    """Register with ``pytorch_lightning``, whose classes are others than those of ``lightning.pytorch``."""
    from pytorch_lightning.strategies import ModelParallelStrategy, StrategyRegistry

    kind = type("PytorchLightningExpertParallelStrategy", (ExpertParallelMixin, ModelParallelStrategy), {})
    StrategyRegistry.register(_NAME, kind, _DESCRIPTION, override=True)

"""Strategies of the Trainer."""

from lightning_nvfp4.strategies.expert_parallel import ExpertParallelStrategy

__all__ = ["ExpertParallelStrategy"]

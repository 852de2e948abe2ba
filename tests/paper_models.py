"""Small models and plain hardware whose times can be worked out by hand."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from tiny_models import tiny_model
from transformers import PreTrainedModel

from lightning_nvfp4 import load_recipe
from lightning_nvfp4.estimate.architecture import Architecture, read_architecture
from lightning_nvfp4.estimate.hardware import Efficiency, Hardware
from lightning_nvfp4.estimate.stacks import FUSED, Stack
from lightning_nvfp4.estimate.step_model import StepModel
from lightning_nvfp4.estimate.workload import Training
from lightning_nvfp4.recipe import Recipe
from lightning_nvfp4.selection import select

FULL = Efficiency({"bf16": 1, "mxfp8": 1, "nvfp4": 1}, 1, 1, 1, 1, 1, 1, 1)
ALL_BLOCKS = {"keep_first_blocks": 0, "keep_last_blocks": 0}


def hardware(**changes: Any) -> Hardware:
    """A GPU that reaches round rates: 1, 2 and 4 PFLOP/s, 1 TB/s, links of 100 and 10 GB/s, no shortest time."""
    efficiency = dataclasses.replace(FULL, **{k: changes.pop(k) for k in list(changes) if hasattr(FULL, k)})
    rates = {"bf16": 1000.0, "mxfp8": 2000.0, "nvfp4": 4000.0}
    plain = Hardware("plain", efficiency, rates, 1.0, 100.0, 8, 10.0, 1e-9, 1e-9)
    return dataclasses.replace(plain, **changes)


def training(**changes: Any) -> Training:
    """One GPU, one micro-batch of 4096 tokens in sequences of 1024."""
    return dataclasses.replace(Training(gpus=1, tokens=4096, sequence_length=1024, micro_batches=1), **changes)


@cache
def _model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


def counts(recipe: Recipe | str = "nvfp4-hybrid") -> Architecture:
    """The counts of a tiny mixture of experts, no block kept."""
    model = _model()
    recipe = load_recipe(recipe, ALL_BLOCKS) if isinstance(recipe, str) else recipe
    return read_architecture(model, select(model, recipe))


def step_model(
    recipe: Recipe | str = "nvfp4-hybrid", gpu: Hardware | None = None, stack: Stack = FUSED, codec: str = "none"
) -> StepModel:
    """The step model of the tiny mixture of experts."""
    return StepModel(counts(recipe), gpu or hardware(), stack, codec)

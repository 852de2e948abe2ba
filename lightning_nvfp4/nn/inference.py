"""Context managers for running a model without training it: evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from lightning_nvfp4.nn.autocast import bf16_autocast
from lightning_nvfp4.nn.convert import ConversionReport, context_of, convert, keeping_conversion
from lightning_nvfp4.recipe import Recipe


@contextmanager
def inference(
    model: nn.Module,
    precision: str | Recipe = "bf16-gemm",
    *,
    overrides: Mapping[str, Any] | None = None,
    backend: str = "auto",
) -> Iterator[ConversionReport]:
    """Convert `model` in place, run under BF16 autocast with each weight quantized once, and undo it on exit.

    A model that is in training in a block-scaled precision goes on in it. Arguments are those of
    `lightning_nvfp4.nn.convert.convert`. Gradients and the training flag are left to the caller.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    with keeping_conversion(model):
        report = convert(model, precision, overrides=overrides, backend=backend)
        with bf16_autocast(device), report.context.cached_weights():
            yield report


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """Quantize each forward weight of a converted `model` once while open, for generation inside training.

    Used where gradients are off (under them a weight is quantized as always). Weights must not change while open.
    A model that is not converted runs as it is.
    """
    context = context_of(model)
    with context.cached_weights() if context else nullcontext():
        yield

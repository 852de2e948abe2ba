"""Thresholds at which reinforcement learning stops itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_nvfp4.errors import UserError


@dataclass(frozen=True)
class AbortThresholds:
    """Bounds of the logged metrics `rl/<name>`; None never stops.

    A healthy 4-bit run has a `logp_diff` of a few hundredths; beyond some tenths, sampling and training have become
    different policies (or are misaligned by a token).
    """

    max_logp_diff: float | None = 0.5
    max_kl: float | None = None
    min_entropy: float | None = None
    max_clip_share: float | None = None
    max_truncated_share: float | None = None
    min_routing_agreement: float | None = None
    max_nonfinite_share: float | None = 0.1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None and math.isnan(limit):
                raise UserError(f"abort.{field.name} is {limit}: give a number, or null for no bound.")

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Compare the metrics of one step.

        Raises:
            UserError: a metric is NaN or beyond its bound; the message names it, the bound and the other metrics.
        """
        crossed = []
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            kind, _, name = field.name.partition("_")
            if limit is None:
                continue
            if name not in metrics:
                raise UserError(f"abort.{field.name} is {limit:g}, and this run has no rl/{name}: set it to null.")
            value = metrics[name]
            if math.isnan(value) or (value > limit if kind == "max" else value < limit):
                crossed.append(f"rl/{name} is {value:.4g}, abort.{field.name} is {limit:g}")
        if crossed:
            seen = ", ".join(f"rl/{name} {value:.4g}" for name, value in metrics.items())
            raise UserError(
                f"RL stopped at step {step}: {'; '.join(crossed)}. Checkpoints saved before are whole. Lower the "
                "learning rate, use a more precise preset, or set the threshold to null. "
                f"All metrics of the step: {seen}."
            )

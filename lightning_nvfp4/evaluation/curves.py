"""Training curves from `metrics.csv`, and the relative loss gap between two of them."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

from lightning_nvfp4.errors import UserError

FINAL_SHARE = 0.1  # the last tenth of a run stands for its end
VALIDATION = "val/loss"


@dataclass(frozen=True)
class Curve:
    """Values of one column over optimizer steps; float64, finite."""

    steps: np.ndarray
    values: np.ndarray

    def smoothed(self, window: int | None = None) -> Curve:
        """Return the trailing mean over `window` points; None = a twentieth of the curve."""
        window = max(1, window or len(self.values) // 20)
        total = np.concatenate([[0.0], np.cumsum(self.values)])
        ends = np.arange(1, len(self.values) + 1)
        starts = np.maximum(0, ends - window)
        return Curve(self.steps, (total[ends] - total[starts]) / (ends - starts))

    def start(self, count: int) -> float:
        """Return the mean of the first `count` values."""
        return float(self.values[:count].mean())

    def end(self, count: int | None = None) -> float:
        """Return the mean of the last `count` values; None = the last tenth."""
        count = max(1, count or math.ceil(len(self.values) * FINAL_SHARE))
        return float(self.values[-count:].mean())


@dataclass(frozen=True)
class LossGap:
    """How far a run's training loss lies above a baseline's.

    Attributes:
        steps: steps that both runs logged.
        relative: smoothed `(loss - baseline) / baseline` at each of them.
        final: the same over the last tenth of the steps, from unsmoothed means.
        validation: the same from the last validation losses; None where a run has none.
    """

    steps: list[int]
    relative: list[float]
    final: float
    validation: float | None

    def sentence(self) -> str:
        """Return the gap in words."""
        text = f"{100 * self.final:+.2f} % relative over the last tenth of {len(self.steps)} common steps"
        return text if self.validation is None else f"{text}; validation {100 * self.validation:+.2f} %"


def read_curves(path: Path) -> dict[str, Curve]:
    """Read every numeric column of a `metrics.csv`; rows without a value are left out, a step's last value counts.

    Raises:
        UserError: no such file, or no `step` column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error}). A training run writes it.") from error
    if rows and "step" not in rows[0]:
        raise UserError(f"{path}: no column step: not the metrics of a training run.")
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, text in row.items():
            if name and name != "step" and text:
                try:
                    value, step = float(text), int(float(row["step"]))
                except (TypeError, ValueError):
                    continue
                if math.isfinite(value):
                    points.setdefault(name, {})[step] = value
    return {
        name: Curve(np.array(sorted(column)), np.array([column[step] for step in sorted(column)]))
        for name, column in points.items()
    }


def loss_gap(
    runs: Path | Sequence[Path],
    baselines: Path | Sequence[Path],
    column: str = "train/loss",
    window: int | None = None,
) -> LossGap:
    """Return the relative loss gap of the run logged in `runs` against `baselines`, both `metrics.csv`.

    Of several logs, seeds of one arm, the mean curve is taken.

    Raises:
        UserError: a file without `column`, or no step in common.
    """
    groups = [[logs] if isinstance(logs, Path) else list(logs) for logs in (runs, baselines)]
    curves = [mean_curves(logs) for logs in groups]
    for logs, found in zip(groups, curves, strict=True):
        if column not in found:
            where = ", ".join(map(str, logs))
            raise UserError(f"{where}: no column {column}; it has {', '.join(sorted(found)) or 'none'}.")
    ours, theirs = curves
    return gap(ours, theirs, column, window, names=(str(groups[0][0]), str(groups[1][0])))


def gap(
    curves: dict[str, Curve],
    base: dict[str, Curve],
    column: str = "train/loss",
    window: int | None = None,
    names: tuple[str, str] = ("run", "baseline"),
) -> LossGap:
    """Return the relative loss gap between two runs' curves."""
    ours, theirs = curves[column], base[column]
    common, left, right = np.intersect1d(ours.steps, theirs.steps, return_indices=True)
    if common.size == 0:
        raise UserError(f"{names[0]} and {names[1]} have no step of {column} in common: compare runs of one length.")
    ours, theirs = Curve(common, ours.values[left]), Curve(common, theirs.values[right])
    smooth, smooth_base = ours.smoothed(window).values, theirs.smoothed(window).values
    relative = (smooth - smooth_base) / smooth_base
    final = (ours.end() - theirs.end()) / theirs.end()
    validation = None
    if VALIDATION in curves and VALIDATION in base:
        mine, other = float(curves[VALIDATION].values[-1]), float(base[VALIDATION].values[-1])
        validation = (mine - other) / other
    return LossGap([int(s) for s in common], [float(r) for r in relative], float(final), validation)


def mean_curves(paths: Sequence[Path]) -> dict[str, Curve]:
    """Return the mean over runs of every column that all of the logs `paths` have, at the steps they share."""
    runs = [read_curves(path) for path in paths]
    means = {}
    for name, curve in runs[0].items():
        curves = [run[name] for run in runs if name in run]
        steps = reduce(np.intersect1d, [c.steps for c in curves], curve.steps)
        if len(curves) == len(runs) and steps.size:
            means[name] = Curve(steps, np.mean([c.values[np.isin(c.steps, steps)] for c in curves], axis=0))
    return means

"""Statistics of paired comparisons: the same documents, scored under two precisions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DISTINCT = 64  # with fewer distinct differences, a resample is a draw of how often each occurs
_CHUNK = 1 << 22  # elements of one block of drawn indices


def bootstrap_interval(
    differences: Sequence[float] | np.ndarray, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of paired differences.

    Args:
        differences: one for each document, `score - baseline score`.
        level: coverage, 0 to 1.
        resamples: how many times documents are drawn with replacement.
        seed: of a generator of its own.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.size == 0:
        raise ValueError("bootstrap_interval needs at least one difference")
    generator = np.random.default_rng(seed)
    distinct, counts = np.unique(values, return_counts=True)
    if distinct.size <= _DISTINCT:
        means = generator.multinomial(values.size, counts / values.size, size=resamples) @ distinct / values.size
    else:
        rows = max(1, _CHUNK // values.size)
        parts = []
        for start in range(0, resamples, rows):
            picked = generator.integers(values.size, size=(min(rows, resamples - start), values.size))
            parts.append(values[picked].mean(axis=1))
        means = np.concatenate(parts)
    tail = (1.0 - level) / 2
    low, high = np.quantile(means, (tail, 1.0 - tail))
    return float(low), float(high)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Args:
        gained: documents that only the run gets right.
        lost: documents that only the baseline gets right.

    Under no difference `gained` is binomial with p = 1/2 of `gained + lost`.

    Source: McNemar, Psychometrika 12 (1947); the exact form is the sign test.
    """
    total = gained + lost
    term = tail = 1  # binomial coefficients as integers: nothing is rounded before the division
    for k in range(min(gained, lost)):
        term = term * (total - k) // (k + 1)
        tail += term
    # 2 ** total is no float from 1024 on: both are shifted first.
    shift = max(0, total - 1000)
    return min(1.0, 2 * (tail >> shift) / 2 ** (total - shift))


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Return the standard error of the mean, from the sample variance; NaN for fewer than two values."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else float("nan")


def student_t(level: float, degrees: int) -> float:
    """Return the two-sided quantile of Student's t distribution: P(|t| <= q) = `level` with `degrees` of freedom.

    Under t = sqrt(degrees) tan(a) the density is proportional to cos(a)^(degrees - 1), which is summed numerically.
    """
    if degrees < 1 or not 0 < level < 1:
        raise ValueError(f"student_t needs a level between 0 and 1 and at least 1 degree, not {level} and {degrees}.")
    angles = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (degrees - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(level, area / area[-1], angles)))


def t_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> tuple[float, float]:
    """Return the t interval of the mean of independent normal `values`; NaN for fewer than two.

    Args:
        values: such as one difference a seed.
        level: coverage, 0 to 1.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size < 2:
        return math.nan, math.nan
    half = student_t(level, array.size - 1) * standard_error(array)
    return float(array.mean() - half), float(array.mean() + half)

"""Statistics of paired comparisons: the same documents, scored under two precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95  # coverage of every interval
SIGNIFICANT = 1.0 - LEVEL
POWER = 0.8  # of a minimum detectable difference

_DISTINCT = 64  # with fewer distinct differences, a resample is a draw of how often each occurs
_CHUNK = 1 << 22  # elements of one block of random draws
_NORMAL = NormalDist()


def bootstrap_interval(
    differences: Sequence[float] | np.ndarray, *, level: float = LEVEL, resamples: int = 10_000, seed: int = 0
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


def proportions_interval(gained: int, lost: int, n: int, *, level: float = LEVEL) -> tuple[float, float]:
    """Return the score interval of the difference of two paired proportions, `(gained - lost) / n`.

    It holds the differences that a score test does not reject. Where few documents change, a bootstrap draws too few
    of them and covers too seldom; where none does, its interval is empty, and this one is not.

    Args:
        gained: documents that only the run gets right.
        lost: documents that only the baseline gets right.
        n: all documents.
        level: coverage, 0 to 1.

    Source: Tango, Statistics in Medicine 17 (1998), 891-908.
    """
    if n < 1 or min(gained, lost) < 0 or gained + lost > n:
        raise ValueError(f"proportions_interval of {gained} gained and {lost} lost in {n} documents")
    critical = _NORMAL.inv_cdf((1.0 + level) / 2)
    centre = (gained - lost) / n

    def accepted(difference: float) -> bool:
        # The share of lost documents that is likeliest at this difference solves a quadratic equation.
        linear = (2 * n - gained + lost) * difference - gained - lost
        root = math.sqrt(max(0.0, linear**2 + 8 * n * lost * difference * (1 - difference)))
        share = (root - linear) / (4 * n)
        variance = n * (2 * share + difference * (1 - difference))
        return (gained - lost - n * difference) ** 2 <= critical**2 * max(variance, 0.0)

    return _edge(accepted, centre, -1.0), _edge(accepted, centre, 1.0)


def _edge(accepted: Callable[[float], bool], inside: float, outside: float) -> float:
    if accepted(outside):
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if accepted(middle) else (inside, middle)
    return inside


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


def sign_flip(differences: Sequence[float] | np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p-value of the paired permutation test of a mean difference.

    Under no difference the run's and the baseline's score of a document may change places, which flips the sign of
    their difference. `resamples` random flips and the observed one are counted, so that p is never 0.

    Source: Good, Permutation, Parametric and Bootstrap Tests of Hypotheses (2005), section 3.2.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0.0]
    if values.size == 0:
        return 1.0
    generator = np.random.default_rng(seed)
    observed = abs(values.sum()) * (1.0 - 1e-12)  # flips of the same sum tie, whatever their order
    extreme, rows = 0, max(1, _CHUNK // values.size)
    for start in range(0, resamples, rows):
        signs = generator.integers(2, size=(min(rows, resamples - start), values.size), dtype=np.int8)
        extreme += int((np.abs((2.0 * signs - 1.0) @ values) >= observed).sum())
    return (extreme + 1) / (resamples + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number by Holm's step-down method, in the order given.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def detectable(
    deviation: float, n: int, *, significant: float = SIGNIFICANT, power: float = POWER, freedom: float = math.inf
) -> float:
    """Return the smallest true difference that a two-sided test of `n` documents finds with probability `power`.

    Args:
        deviation: standard deviation of the paired differences; for scores of 0 and 1 the root of the share of
            documents that change.
        n: documents.
        significant: level of the test; divide it by the number of tasks for Holm's first step.
        power: probability of finding it.
        freedom: degrees of freedom of `deviation`.

    Source: the normal approximation, Connor, Biometrics 43 (1987), 207-211.
    """
    from scipy.stats import t

    return float(t.ppf(1 - significant / 2, freedom) + t.ppf(power, freedom)) * deviation / math.sqrt(n)


def fewest_changes(significant: float = SIGNIFICANT) -> int:
    """Return how many documents must change, all in one direction, before McNemar's exact test can be significant."""
    return math.ceil(1 - math.log2(significant))


@dataclass(frozen=True)
class SeedsEstimate:
    """A mean difference of two arms over documents and seeds.

    Attributes:
        delta: arm minus baseline.
        low, high: 95 % interval.
        p: two-sided, of Student's t.
        error: standard error.
        freedom: its degrees of freedom.
    """

    delta: float
    low: float
    high: float
    p: float
    error: float
    freedom: float


def over_seeds(scores: np.ndarray, baseline: np.ndarray, *, level: float = LEVEL) -> SeedsEstimate:
    """Compare two arms of several seeds each over the same documents, both taken as drawn at random.

    The variance of the difference is that over documents of the seeds' means, plus that over seeds of the documents'
    means. Both contain the luck of one seed on one document, so the interval is cautious where that is all there is.
    Student's t has the degrees of freedom of Satterthwaite's approximation. Seeds of the two arms are not paired.

    Args:
        scores: of the arm, [seed, document].
        baseline: of the baseline, likewise; the arms together need three seeds or more.
        level: coverage, 0 to 1.

    Source: Owen, Annals of Applied Statistics 1 (2007), 386-411 (the sum of both); Satterthwaite, Biometrics 2 (1946).
    """
    from scipy.stats import t

    seeds = (len(scores), len(baseline))
    freedom = sum(seeds) - 2
    if freedom < 1 or scores.shape[1] != baseline.shape[1] or scores.shape[1] < 2:
        raise ValueError(f"over_seeds of {scores.shape} and {baseline.shape}: three seeds, two common documents")
    n = scores.shape[1]
    differences = scores.mean(axis=0) - baseline.mean(axis=0)
    documents = float(differences.var(ddof=1)) / n
    means = [arm.mean(axis=1) for arm in (scores, baseline)]
    # Pooled over the arms, so that one of them may have a single seed.
    seeds_variance = sum(float(((m - m.mean()) ** 2).sum()) for m in means) / freedom * (1 / seeds[0] + 1 / seeds[1])
    variance = documents + seeds_variance
    delta = float(differences.mean())
    if variance == 0.0:
        return SeedsEstimate(delta, delta, delta, float(delta == 0.0), 0.0, freedom)
    effective = variance**2 / (documents**2 / (n - 1) + seeds_variance**2 / freedom)
    error = math.sqrt(variance)
    reach = float(t.ppf((1 + level) / 2, effective)) * error
    p = float(2 * t.sf(abs(delta) / error, effective))
    return SeedsEstimate(delta, delta - reach, delta + reach, p, error, effective)


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Return the standard error of the mean, from the sample variance; NaN for fewer than two values."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else float("nan")


def t_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> tuple[float, float]:
    """Return the t interval of the mean of independent normal `values`; NaN for fewer than two.

    Args:
        values: such as one difference a seed.
        level: coverage, 0 to 1.
    """
    from scipy.stats import t

    array = np.asarray(values, dtype=np.float64)
    if array.size < 2:
        return math.nan, math.nan
    half = float(t.ppf((1 + level) / 2, array.size - 1)) * standard_error(array)
    return float(array.mean() - half), float(array.mean() + half)

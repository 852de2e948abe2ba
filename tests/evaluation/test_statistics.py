"""Laws of the statistics that verdicts rest on."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from lightning_nvfp4.evaluation.statistics import bootstrap_interval, mcnemar, standard_error, student_t, t_interval


def test_the_interval_covers_the_true_mean_in_about_95_of_100_experiments() -> None:
    generator = np.random.default_rng(0)
    truth, covered, experiments = 0.05, 0, 400
    for _ in range(experiments):
        differences = generator.choice([-1.0, 0.0, 1.0], p=[0.10, 0.75, 0.15], size=300)
        low, high = bootstrap_interval(differences, resamples=1000)
        covered += low <= truth <= high
    # Binomial(400, .95) has a standard deviation of 4.4: four of them either way.
    assert 362 <= covered <= 398


def test_both_ways_of_resampling_agree() -> None:
    values = np.random.default_rng(1).normal(size=500)  # all distinct: resampled by index
    rounded = values.round(1)  # few distinct: resampled by count
    exact, counted = bootstrap_interval(values, resamples=20_000), bootstrap_interval(rounded, resamples=20_000)
    width = 2 * 1.96 * values.std() / math.sqrt(500)
    assert exact[1] - exact[0] == pytest.approx(width, rel=0.05)
    assert counted == pytest.approx(exact, abs=0.01)


def test_the_interval_is_a_function_of_its_arguments() -> None:
    differences = [0.0, 1.0, -1.0, 1.0] * 10
    assert bootstrap_interval(differences) == bootstrap_interval(differences)
    low, high = bootstrap_interval([-d for d in differences])
    assert (-high, -low) == pytest.approx(bootstrap_interval(differences), abs=0.051)
    assert bootstrap_interval([0.25] * 9) == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([])


# Two-sided p of the sign test, by the fractions that define it.
@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, Fraction(1)),
        (1, 0, Fraction(1)),
        (0, 5, Fraction(1, 16)),
        (0, 6, Fraction(1, 32)),
        (1, 8, Fraction(20, 512)),
        (2, 10, Fraction(158, 4096)),
        (3, 3, Fraction(1)),
        (10, 20, Fraction(2 * 53009102, 2**30)),
    ],
)
def test_mcnemar(gained: int, lost: int, p: Fraction) -> None:
    assert mcnemar(gained, lost) == pytest.approx(float(p), rel=1e-12)
    assert mcnemar(lost, gained) == mcnemar(gained, lost)


def test_mcnemar_of_large_counts_follows_the_normal_limit() -> None:
    gained, lost = 5000, 5250
    z = (lost - gained - 1) / math.sqrt(gained + lost)
    assert mcnemar(gained, lost) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)
    assert mcnemar(499, 500) == pytest.approx(1.0)
    assert mcnemar(500, 501) == pytest.approx(1.0)


def test_standard_error() -> None:
    assert standard_error([0.0, 1.0] * 50) == pytest.approx(math.sqrt(0.25 / 99))
    assert math.isnan(standard_error([1.0]))


@pytest.mark.parametrize("degrees, quantile", [(1, 12.706205), (2, 4.302653), (4, 2.776445), (30, 2.042272)])
def test_quantiles_of_student_are_those_of_the_tables(degrees, quantile):
    assert student_t(0.95, degrees) == pytest.approx(quantile, rel=1e-6)


def test_a_t_interval_needs_two_values():
    assert all(math.isnan(end) for end in t_interval([1.0]))
    assert t_interval([1.0, 3.0]) == pytest.approx((2 - 12.706205, 2 + 12.706205), rel=1e-6)

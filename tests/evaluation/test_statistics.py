"""Laws of the statistics that verdicts rest on."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from lightning_nvfp4.evaluation.statistics import (
    bootstrap_interval,
    detectable,
    fewest_changes,
    holm,
    mcnemar,
    over_seeds,
    proportions_interval,
    sign_flip,
    standard_error,
    t_interval,
)


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


@pytest.mark.parametrize(("n", "gained", "lost"), [(100, 0.01, 0.04), (500, 0.025, 0.075), (1000, 0.005, 0.005)])
def test_the_score_interval_covers_the_true_difference_of_proportions(n: int, gained: float, lost: float) -> None:
    generator = np.random.default_rng(0)
    draws = generator.multinomial(n, [gained, lost, 1 - gained - lost], size=1000)
    covered = 0
    for more, fewer, _ in draws.tolist():
        low, high = proportions_interval(more, fewer, n)
        covered += low <= gained - lost <= high
    assert 930 <= covered <= 970  # 95 % of 1000 and three standard deviations


def test_the_score_interval_is_where_the_score_test_turns() -> None:
    gained, lost, n = 12, 2, 50
    for edge in proportions_interval(gained, lost, n):
        # The share of lost documents by brute force: the likeliest of those that the difference allows.
        shares = np.linspace(max(0.0, -edge), (1 - edge) / 2, 200_001)[1:-1]
        likelihood = gained * np.log(shares + edge) + lost * np.log(shares)
        likelihood += (n - gained - lost) * np.log(1 - 2 * shares - edge)
        share = shares[likelihood.argmax()]
        z = (gained - lost - n * edge) / math.sqrt(n * (2 * share + edge - edge**2))
        assert abs(z) == pytest.approx(1.95996, abs=1e-3)
    low, high = proportions_interval(3, 9, 80)
    assert proportions_interval(9, 3, 80) == pytest.approx((-high, -low))
    assert proportions_interval(0, 0, 200)[1] == pytest.approx(1.96**2 / (200 + 1.96**2), rel=1e-3)
    assert proportions_interval(5, 0, 5)[1] == 1.0
    with pytest.raises(ValueError, match="6 gained and 0 lost in 5"):
        proportions_interval(6, 0, 5)


def test_what_mcnemar_finds_significant_the_score_interval_does_not_cross() -> None:
    for changed in range(1, 400):
        gained = max((g for g in range(changed // 2 + 1) if mcnemar(g, changed - g) <= 0.05), default=None)
        if gained is not None:
            for n in (changed, 5 * changed):
                assert proportions_interval(gained, changed - gained, n)[1] < 0


def test_sign_flips_count_every_arrangement() -> None:
    # Of the 16 signs of four equal differences two are as extreme as all of them alike.
    assert sign_flip([1.0, 1.0, 1.0, 1.0, 0.0]) == pytest.approx(2 / 16, abs=0.01)
    assert sign_flip([0.5, -0.5]) == 1.0
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([0.1] * 100) == pytest.approx(1 / 10_001)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02] and holm([]) == []


def test_the_detectable_difference_is_found_four_times_in_five() -> None:
    n, share = 1000, 0.1
    drop = detectable(math.sqrt(share), n)
    assert drop == pytest.approx(2.8016 * math.sqrt(share / n), rel=1e-4)
    generator = np.random.default_rng(0)
    draws = generator.multinomial(n, [(share - drop) / 2, (share + drop) / 2, 1 - share], size=2000)
    found = np.mean([mcnemar(g, lost) <= 0.05 for g, lost, _ in draws.tolist()])
    assert 0.75 <= found <= 0.84  # the exact test is a little cautious
    assert fewest_changes() == 6 and mcnemar(0, 6) <= 0.05 < mcnemar(0, 5)


def arms(generator: np.random.Generator, seeds: tuple[int, int], spread: float, n: int = 300) -> list[np.ndarray]:
    """Two arms of seeds of one kind: scores of 0 and 1, whose rate moves by `spread` from seed to seed."""
    rates = generator.beta(0.6, 0.6, n)
    return [
        np.array([generator.random(n) < rates * (1 + generator.normal(0, spread)) for _ in range(count)], float)
        for count in seeds
    ]


@pytest.mark.parametrize("seeds", [(2, 2), (5, 5), (1, 3)])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_the_interval_over_seeds_holds_the_luck_of_a_seed(seeds: tuple[int, int], spread: float) -> None:
    generator = np.random.default_rng(0)
    estimates = [over_seeds(*arms(generator, seeds, spread)) for _ in range(400)]
    covered = sum(e.low <= 0 <= e.high for e in estimates)
    assert covered >= 366, "95 % of 400 less three standard deviations"
    assert sum(e.p > 0.05 for e in estimates) == covered, "interval and test say the same"


def test_documents_alone_miss_the_luck_of_a_seed() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        run, baseline = arms(generator, (1, 1), 0.1)
        low, high = bootstrap_interval((run - baseline)[0], resamples=1000)
        covered += low <= 0 <= high
    assert covered < 360


def test_over_seeds_of_equal_seeds() -> None:
    values = np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    same = over_seeds(values, values)
    assert (same.delta, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="three seeds"):
        over_seeds(values[:1], values[:1])


def test_a_t_interval_is_that_of_the_tables_and_needs_two_values():
    assert all(math.isnan(end) for end in t_interval([1.0]))
    assert t_interval([1.0, 3.0]) == pytest.approx((2 - 12.706205, 2 + 12.706205), rel=1e-6)

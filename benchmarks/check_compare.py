"""Simulate comparisons whose truth is known: how often the verdict says it, how often the interval holds it.

    python benchmarks/check_compare.py [--experiments 2000] [--seed 0]

Scores are drawn by document: right or wrong unless it says graded. Verdicts are those of `nvfp4 compare`.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from lightning_nvfp4.evaluation.paired import SAME, WITHIN_NOISE, Delta, judged, paired_delta
from lightning_nvfp4.evaluation.pairing import Documents
from lightning_nvfp4.evaluation.statistics import bootstrap_interval, detectable, proportions_interval

Draw = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
"""Scores of the run and of the baseline, each [seed, document]."""


def documents(values: np.ndarray) -> Documents:
    n = values.shape[1]
    return Documents(tuple(map(str, range(n))), values.astype(float), np.ones(n), None, None, ())


def verdicts(draw: Draw, generator: np.random.Generator, tasks: int = 1) -> list[Delta]:
    """Compare one run with the baseline over `tasks` tasks and return the deltas."""
    pairs = [tuple(map(documents, draw(generator))) for _ in range(tasks)]
    return judged([paired_delta("run", *pair) for pair in pairs], list(pairs), [True] * tasks)


def planted(n: int, gained: float, lost: float) -> Draw:
    """Right and wrong answers of which the share `gained` is right in the run only, `lost` in the baseline only."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        kind = generator.choice(3, size=n, p=[gained, lost, 1 - gained - lost])
        base = np.where(kind == 2, generator.random(n) < 0.5, kind == 1)
        return np.where(kind == 2, base, kind == 0)[None], base[None]

    return draw


def reseeded(n: int, seeds: tuple[int, int] = (1, 1), luck: float = 0.0) -> Draw:
    """Runs of one way of training: a document's chance is the same in all, and moves by `luck` with the seed."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        chance = 0.8 * generator.beta(0.6, 0.6, n)

        def arm(count: int) -> np.ndarray:
            return np.array([generator.random(n) < chance * (1 + luck * generator.normal()) for _ in range(count)])

        return arm(seeds[0]), arm(seeds[1])

    return draw


def graded(n: int) -> Draw:
    """Shares of four samples that pass; the run passes half a point less in a hundred."""

    def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        chance = generator.beta(0.6, 0.6, n)
        return generator.binomial(4, 0.99 * chance, n)[None] / 4, generator.binomial(4, chance, n)[None] / 4

    return draw


def main() -> None:
    """Print a table of verdicts and one of coverages."""
    parser = argparse.ArgumentParser(description="Simulate comparisons whose truth is known.")
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator, count = np.random.default_rng(options.seed), options.experiments
    print(f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{count} experiments a line, seed {options.seed}\n")
    print("| truth | within noise | worse | better |\n|---|---|---|---|")
    drop = planted(500, 0.025, 0.075)
    for name, draw, tasks in (
        ("two runs that differ by sampling seed alone, 500 documents", reseeded(500), 1),
        ("two checkpoints whose seeds' luck is 3 %, one seed each", reseeded(500, luck=0.03), 1),
        ("the same, three seeds each", reseeded(500, (3, 3), 0.03), 1),
        ("5 points less, 10 % of 500 documents change", drop, 1),
        ("the same in each of 8 tasks, Holm", drop, 8),
    ):
        said = [d.verdict.split(" by ")[0] for _ in range(count // tasks) for d in verdicts(draw, generator, tasks)]
        noise = sum(word in (WITHIN_NOISE, SAME) for word in said)
        cells = [f"{100 * k / len(said):.1f} %" for k in (noise, said.count("worse"), said.count("better"))]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    families = [verdicts(reseeded(500), generator, 8) for _ in range(count // 8)]
    wrong = sum(any(d.verdict.startswith(("worse", "better")) for d in family) for family in families)
    raw = sum(any(d.p <= 0.05 for d in family) for family in families)
    print(f"\n8 tasks without a difference: a false verdict in {100 * wrong / len(families):.1f} % of ", end="")
    print(f"{len(families)} comparisons, {100 * raw / len(families):.1f} % without Holm.\n", flush=True)
    print("| coverage of the 95 % interval | score interval | bootstrap |\n|---|---|---|")
    for n, gained, lost in (
        (164, 0.02, 0.05),
        (200, 0.01, 0.01),
        (500, 0.005, 0.015),
        (500, 0.025, 0.075),
        (1000, 0.05, 0.05),
        (1000, 0.14, 0.16),
        (100, 0.01, 0.02),
    ):
        held = np.zeros(2)
        for more, fewer, _ in generator.multinomial(n, [gained, lost, 1 - gained - lost], size=count).tolist():
            changes = [1.0] * more + [-1.0] * fewer + [0.0] * (n - more - fewer)
            boot = bootstrap_interval(changes, resamples=2000, seed=int(generator.integers(1 << 30)))
            for place, (low, high) in enumerate((proportions_interval(more, fewer, n), boot)):
                held[place] += low - 1e-12 <= gained - lost <= high + 1e-12
        cells = " | ".join(f"{100 * value / count:.1f} %" for value in held)
        print(f"| {n} documents, {100 * gained:g} % gained, {100 * lost:g} % lost | {cells} |", flush=True)
    for n in (164, 500):
        held = sum(d.low <= -0.01 * 0.5 <= d.high for _ in range(count) for d in verdicts(graded(n), generator))
        print(f"| {n} documents, pass@1 of 4 samples | | {100 * held / count:.1f} % |", flush=True)
    print("\n| coverage over seeds | luck 0 % | 3 % | 10 % |\n|---|---|---|---|")
    for seeds in ((2, 2), (3, 3), (5, 5), (1, 3)):
        cells = []
        for luck in (0.0, 0.03, 0.1):
            deltas = [verdicts(reseeded(300, seeds, luck), generator)[0] for _ in range(count)]
            cells.append(f"{100 * sum(d.low <= 0 <= d.high for d in deltas) / count:.1f} %")
        print(f"| {seeds[0]} and {seeds[1]} seeds, 300 documents | {' | '.join(cells)} |", flush=True)
    print("\n| documents | 2 % change | 5 % | 10 % | 20 % | 30 % |\n|---|---|---|---|---|---|")
    for n in (100, 164, 200, 378, 500, 1000, 1319, 14042):
        cells = [f"{100 * detectable(share**0.5, n):.1f}" for share in (0.02, 0.05, 0.1, 0.2, 0.3)]
        print(f"| {n} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

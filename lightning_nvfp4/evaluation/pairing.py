"""The documents of a comparison's arms, brought into one order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.results import EvalResult, Sample

Key = tuple[str, str]
"""Task and metric."""


@dataclass(frozen=True)
class Documents:
    """What the seeds of one arm made of the documents of one task and metric.

    Attributes:
        ids: of the documents, sorted.
        values: scores, [seed, document].
        weights: of the documents in the mean, [document].
        choices: answers taken, [seed][document]; None where the task records none.
        logprobs: log-likelihoods of the reference answers in nats, [seed, document]; None likewise.
        samples: of the first seed.
    """

    ids: tuple[str, ...]
    values: np.ndarray
    weights: np.ndarray
    choices: list[list[Any]] | None
    logprobs: np.ndarray | None
    samples: tuple[Sample, ...]

    @property
    def mean(self) -> float:
        """The score: the weighted mean over documents and seeds."""
        return float(np.average(self.values.mean(axis=0), weights=self.weights))


def documents_of(label: str, results: Sequence[EvalResult]) -> dict[Key, Documents]:
    """Return the documents of every task and metric that all seeds of the arm `label` scored.

    Raises:
        UserError: seeds over different documents, or numbers that cannot be compared.
    """
    for result in results:
        _check(label, result)
    by_seed = [_by_task(result) for result in results]
    found = {}
    for key, first in by_seed[0].items():
        seeds = [tasks[key] for tasks in by_seed if key in tasks]
        if len(seeds) < len(results):
            continue
        for number, other in enumerate(seeds[1:], start=2):
            same_documents(key, f"the first file of {label}", first.keys(), f"its file {number}", other.keys())
        ids = tuple(sorted(first))
        lanes = [[seed[i] for i in ids] for seed in seeds]
        found[key] = Documents(
            ids,
            np.array([[sample.value for sample in lane] for lane in lanes]),
            np.array([sample.weight for sample in lanes[0]]),
            _choices(lanes),
            _logprobs(lanes),
            tuple(lanes[0]),
        )
    return found


def _check(label: str, result: EvalResult) -> None:
    for sample in result.samples:
        where = f"{label}: document {sample.id} of {sample.task} {sample.metric}"
        if not math.isfinite(sample.value) or (sample.logprob is not None and math.isnan(sample.logprob)):
            raise UserError(
                f"{where} has score {sample.value} and log-likelihood {sample.logprob}: need numbers. The model's "
                "outputs are not finite there; leave this result out, or evaluate again."
            )
        if not (math.isfinite(sample.weight) and sample.weight > 0):
            raise UserError(f"{where} has weight {sample.weight}: need one above 0. Evaluate again.")


def same_documents(key: Key, name: str, a: Any, label: str, b: Any) -> None:
    """Raise a `UserError` where the identities `a` and `b` of two runs' documents differ."""
    if a != b:
        raise UserError(
            f"{' '.join(key)}: {name} and {label} scored different documents ({len(a)} and {len(b)}, {len(a & b)} in "
            "common): evaluate both with the same suite, --seed and --limit."
        )


def _by_task(result: EvalResult) -> dict[Key, dict[str, Sample]]:
    tasks: dict[Key, dict[str, Sample]] = {}
    for sample in result.samples:
        tasks.setdefault((sample.task, sample.metric), {})[sample.id] = sample
    return tasks


def _choices(lanes: list[list[Sample]]) -> list[list[Any]] | None:
    # No answer is an answer too, but not where no document has one.
    choices = [[sample.choice for sample in lane] for lane in lanes]
    return choices if all(any(choice is not None for choice in lane) for lane in choices) else None


def _logprobs(lanes: list[list[Sample]]) -> np.ndarray | None:
    values = [[sample.logprob for sample in lane] for lane in lanes]
    return None if any(value is None for lane in values for value in lane) else np.array(values, dtype=np.float64)

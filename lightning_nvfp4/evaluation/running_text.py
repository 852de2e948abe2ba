"""Perplexities of running text, which are no means over documents: their ratio between two arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_nvfp4.evaluation.paired import Interval
from lightning_nvfp4.evaluation.pairing import Documents, Key
from lightning_nvfp4.evaluation.results import EvalResult
from lightning_nvfp4.evaluation.statistics import bootstrap_interval


@dataclass(frozen=True)
class Perplexity:
    """One run's perplexity of a text and the baseline's; geometric means over seeds.

    Attributes:
        task, metric: as in the scores, such as ``word_perplexity``.
        run: label.
        value: of the run.
        baseline: of the baseline.
        ratio: run over baseline. The interval is over documents, and None where they are not recorded.
    """

    task: str
    metric: str
    run: str
    value: float
    baseline: float
    ratio: float
    interval: Interval | None


def perplexity_ratios(
    run: str,
    results: Sequence[EvalResult],
    baseline: Sequence[EvalResult],
    documents: dict[Key, Documents],
    baseline_documents: dict[Key, Documents],
) -> list[Perplexity]:
    """Compare every score that has no documents of its own and is called a perplexity."""
    found = []
    for score in baseline[0].scores:
        key = (score.task, score.metric)
        if not score.metric.endswith("perplexity"):
            continue
        values, base = _values(results, key), _values(baseline, key)
        if len(values) < len(results) or len(base) < len(baseline):
            continue
        value, other = (math.exp(float(np.mean(np.log(v)))) for v in (values, base))
        interval = _interval(score.task, score.metric, documents, baseline_documents)
        found.append(Perplexity(*key, run, value, other, value / other, interval))
    return found


def _values(results: Sequence[EvalResult], key: Key) -> list[float]:
    return [s.value for result in results for s in result.scores if (s.task, s.metric) == key]


def _interval(task: str, metric: str, ours: dict[Key, Documents], theirs: dict[Key, Documents]) -> Interval | None:
    unit = f"{metric.removesuffix('_perplexity')}s"  # words, bytes, tokens
    for key, documents in ours.items():
        other = theirs.get(key)
        if key[0] != task or other is None or documents.ids != other.ids:
            continue
        if documents.logprobs is None or other.logprobs is None:
            continue
        sizes = [s.response.get(unit) if isinstance(s.response, dict) else None for s in documents.samples]
        if any(not isinstance(size, int | float) for size in sizes):
            continue
        units = np.array(sizes, dtype=np.float64)
        changes = other.logprobs.mean(axis=0) - documents.logprobs.mean(axis=0)  # nats lost on each document
        mean = changes.sum() / units.sum()
        low, high = bootstrap_interval((changes - mean * units) / units.mean() + mean)
        return Interval(*(math.exp(x) for x in (mean, low, high)))
    return None

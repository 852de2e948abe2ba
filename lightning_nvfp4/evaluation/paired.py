"""One arm against the baseline on one task: difference, interval, test, and what moves before the score does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lightning_nvfp4.evaluation.pairing import Documents
from lightning_nvfp4.evaluation.statistics import (
    SIGNIFICANT,
    bootstrap_interval,
    detectable,
    fewest_changes,
    holm,
    mcnemar,
    over_seeds,
    proportions_interval,
    sign_flip,
)

WITHIN_NOISE = "within noise"
SAME = "the same on every document"


@dataclass(frozen=True)
class Interval:
    """A value and its paired 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Delta:
    """One run against the baseline on one task.

    Attributes:
        run: label of the run.
        score: mean of the run.
        baseline_score: mean of the baseline on the same documents.
        delta: `score - baseline_score`.
        low, high: paired 95 % interval of `delta`, not corrected for the number of tasks.
        test: which one `p` comes from: ``McNemar``, ``sign flip``, or ``t over seeds``.
        p: two-sided p-value of no difference.
        p_holm: the same, corrected for the number of tasks.
        detectable: smallest true difference that the test, corrected, finds with 80 % probability.
        gained, lost: documents that only the run, only the baseline gets right; None for scores other than 0 or 1, and
            for several seeds.
        same_answer: share of documents with the baseline's answer, over all pairs of seeds; None where no answers are
            recorded.
        logprob: mean change of the reference answer's log-likelihood, in nats a document; None likewise.
        perplexity_ratio: `exp(-logprob)`: the run's perplexity of reference answers over the baseline's.
        verdict: in words.
    """

    run: str
    score: float
    baseline_score: float
    delta: float
    low: float
    high: float
    test: str
    p: float
    p_holm: float
    detectable: float
    gained: int | None = None
    lost: int | None = None
    same_answer: float | None = None
    logprob: Interval | None = None
    perplexity_ratio: Interval | None = None
    verdict: str = ""

    @property
    def in_points(self) -> bool:
        """Whether scores are shares, shown in hundredths."""
        return 0.0 <= min(self.score, self.baseline_score) and max(self.score, self.baseline_score) <= 1.0


def paired_delta(run: str, documents: Documents, baseline: Documents) -> Delta:
    """Compare one arm with the baseline over the same documents, before any correction and verdict."""
    ours, theirs, n = documents.values, baseline.values, len(documents.ids)
    gained = lost = None
    if len(ours) + len(theirs) > 2 and n > 1:
        scale = documents.weights / documents.weights.mean()
        estimate = over_seeds(ours * scale, theirs * scale)
        interval, p, test = Interval(estimate.delta, estimate.low, estimate.high), estimate.p, "t over seeds"
    else:
        differences = ours.mean(axis=0) - theirs.mean(axis=0)  # one seed each, or one document
        right = len(ours) + len(theirs) == 2 and np.isin(np.stack((ours, theirs)), (0.0, 1.0)).all()
        if right and np.ptp(documents.weights) == 0.0:
            gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
            interval = Interval((gained - lost) / n, *proportions_interval(gained, lost, n))
            p, test = mcnemar(gained, lost), "McNemar"
        else:
            interval = _mean(differences, documents.weights)
            p, test = sign_flip(differences * documents.weights), "sign flip"
    same = None
    if documents.choices is not None and baseline.choices is not None:
        same = agreement(documents.choices, baseline.choices)
    logprob = _logprob(documents, baseline)
    return Delta(
        run=run,
        score=documents.mean,
        baseline_score=baseline.mean,
        delta=interval.value,
        low=interval.low,
        high=interval.high,
        test=test,
        p=p,
        p_holm=p,
        detectable=0.0,
        gained=gained,
        lost=lost,
        same_answer=same,
        logprob=logprob,
        perplexity_ratio=logprob and Interval(*(math.exp(-x) for x in (logprob.value, logprob.high, logprob.low))),
    )


def judged(deltas: list[Delta], pairs: list[tuple[Documents, Documents]], higher: list[bool]) -> list[Delta]:
    """Return one run's `deltas`, one for each task, with corrected p-values, detectable differences and verdicts.

    Args:
        deltas: of `paired_delta`.
        pairs: what each of them compared.
        higher: whether more is better, likewise.
    """
    done = []
    significant = SIGNIFICANT / max(1, len(deltas))
    for delta, pair, up, p in zip(deltas, pairs, higher, holm([d.p for d in deltas]), strict=True):
        delta = replace(delta, p_holm=p, detectable=_detectable(delta, *pair, significant))
        done.append(replace(delta, verdict=_verdict(delta, up)))
    return done


def _verdict(delta: Delta, higher_is_better: bool) -> str:
    if delta.delta == delta.low == delta.high == 0.0 or (delta.gained, delta.lost) == (0, 0):
        return SAME
    if delta.p_holm > SIGNIFICANT or delta.low <= 0.0 <= delta.high:
        return WITHIN_NOISE
    word = "better" if (delta.delta > 0) == higher_is_better else "worse"
    size, reach = abs(delta.delta), (delta.high - delta.low) / 2
    if delta.in_points:
        return f"{word} by {100 * size:.1f} ± {100 * reach:.1f} points"
    return f"{word} by {size:.3g} ± {reach:.2g}"


def _detectable(delta: Delta, documents: Documents, baseline: Documents, significant: float) -> float:
    n = len(documents.ids)
    if delta.test == "t over seeds":
        scale = documents.weights / documents.weights.mean()
        estimate = over_seeds(documents.values * scale, baseline.values * scale)
        return detectable(estimate.error * math.sqrt(n), n, significant=significant, freedom=estimate.freedom)
    scale = documents.weights / documents.weights.mean()
    spread = float(np.sqrt((((documents.values.mean(axis=0) - baseline.values.mean(axis=0)) * scale) ** 2).mean()))
    found = detectable(spread, n, significant=significant)
    if delta.test == "McNemar":
        found = max(found, fewest_changes(significant) / n)
    return min(found, 1.0) if delta.in_points else found


def _mean(differences: np.ndarray, weights: np.ndarray) -> Interval:
    scale = weights / weights.mean()
    value = float((differences * scale).mean())
    # A weighted mean is a ratio of two sums; its influence values make it a plain mean.
    low, high = bootstrap_interval((differences - value) * scale + value)
    return Interval(value, low, high)


def _logprob(documents: Documents, baseline: Documents) -> Interval | None:
    ours, theirs = documents.logprobs, baseline.logprobs
    if ours is None or theirs is None or isinstance(documents.samples[0].response, dict):
        return None  # of running text: see `running_text`
    if len(ours) + len(theirs) > 2 and len(documents.ids) > 1:
        estimate = over_seeds(ours, theirs)
        return Interval(estimate.delta, estimate.low, estimate.high)
    return _mean(ours.mean(axis=0) - theirs.mean(axis=0), documents.weights)


def agreement(ours: list[list[object]], theirs: list[list[object]]) -> float:
    """Return the share of documents with one answer, over all pairs of a seed of `ours` and one of `theirs`."""
    pairs = [(a, b) for a in ours for b in theirs]
    return sum(sum(x == y for x, y in zip(a, b, strict=True)) / len(a) for a, b in pairs) / len(pairs)

"""Compare evaluations paired by document: what changed, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.arms import Arm, read_arms
from lightning_nvfp4.evaluation.curves import LossGap, loss_gap
from lightning_nvfp4.evaluation.paired import Delta, agreement, judged, paired_delta
from lightning_nvfp4.evaluation.pairing import Documents, Key, documents_of, same_documents
from lightning_nvfp4.evaluation.results import EvalResult
from lightning_nvfp4.evaluation.running_text import Perplexity, perplexity_ratios


@dataclass(frozen=True)
class Row:
    """One task and metric: the baseline's score and the other runs' deltas."""

    task: str
    metric: str
    n: int
    higher_is_better: bool
    baseline_score: float
    deltas: tuple[Delta, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs against one baseline, and the loss gaps where training logs lie beside them.

    Attributes:
        baseline: label of the baseline.
        runs: labels of the others.
        rows: one for each task and metric.
        perplexities: of running text.
        notes: what a reader should know before trusting a verdict.
        losses: relative loss gaps by run.
        sources: how each result was made, by run.
    """

    baseline: str
    runs: tuple[str, ...]
    rows: tuple[Row, ...]
    perplexities: tuple[Perplexity, ...] = ()
    notes: tuple[str, ...] = ()
    losses: tuple[tuple[str, LossGap], ...] = ()
    sources: tuple[tuple[str, dict[str, Any]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return asdict(self)


def compare(
    paths: Sequence[str | Path],
    baseline: str | None = None,
    arms: Mapping[str, Sequence[str | Path]] | None = None,
) -> Comparison:
    """Compare results of `evaluate` by document.

    Args:
        paths: result files, folders of them, or run folders; each result is a run of its own. Two or more run folders
            with a `metrics.csv` add the loss gap to the first of them.
        baseline: label or precision of the run to compare with; None = the first.
        arms: label -> paths whose results are seeds of one arm.

    Raises:
        UserError: fewer than two runs, an unknown baseline, runs over different documents.
    """
    found = read_arms(paths, arms)
    scored = {arm.label: arm.results for arm in found if arm.results}
    logged = [arm for arm in found if arm.logs]
    if len(scored) < 2 and len(logged) < 2:
        raise UserError(
            f"compare found {len(scored)} results and {len(logged)} training logs in "
            f"{', '.join(map(str, [*paths, *(arms or ())]))}: need at least two of either."
        )
    comparison = compare_results(scored, baseline) if len(scored) > 1 else Comparison("", (), ())
    if len(logged) > 1:
        comparison = replace(comparison, losses=_losses(logged, comparison.baseline))
        comparison = comparison if comparison.baseline else replace(comparison, baseline=logged[0].label)
    return comparison


def compare_results(
    results: Mapping[str, EvalResult | Sequence[EvalResult]], baseline: str | None = None
) -> Comparison:
    """Compare results in memory by label, several seeds of an arm as a sequence; see `compare`."""
    arms = {label: (r,) if isinstance(r, EvalResult) else tuple(r) for label, r in results.items()}
    name = _baseline(arms, baseline)
    reference = documents_of(name, arms[name])
    notes = _notes(arms)
    if not reference:
        raise UserError(f"{name} scored no task: nothing to compare. Evaluate it first.")
    deltas: dict[Key, list[Delta]] = {key: [] for key in reference}
    perplexities: list[Perplexity] = []
    others = [label for label in arms if label != name]
    for label in others:
        scored = documents_of(label, arms[label])
        common: dict[Key, tuple[Documents, Documents]] = {}
        for key, documents in reference.items():
            if key not in scored:
                reason = arms[label][0].skipped.get(key[0], "not in its suite")
                notes.append(f"{label} has no {' '.join(key)}: {reason}.")
                continue
            same_documents(key, name, set(documents.ids), label, set(scored[key].ids))
            common[key] = (scored[key], documents)
        notes += _pairing_notes(label, arms[label][0], name, arms[name][0], common)
        found = [paired_delta(label, *pair) for pair in common.values()]
        higher = [arms[name][0].score(*key).higher_is_better for key in common]
        for key, delta in zip(common, judged(found, list(common.values()), higher), strict=True):
            deltas[key].append(delta)
        perplexities += perplexity_ratios(label, arms[label], arms[name], scored, reference)
    rows = [
        Row(*key, len(docs.ids), arms[name][0].score(*key).higher_is_better, docs.mean, tuple(deltas[key]))
        for key, docs in reference.items()
    ]
    notes += _own_agreement(name, reference)
    sources = tuple((label, _source(result)) for label, arm in arms.items() for result in arm)
    return Comparison(
        name, tuple(others), tuple(rows), tuple(perplexities), tuple(dict.fromkeys(notes)), sources=sources
    )


def _losses(logged: Sequence[Arm], baseline: str) -> tuple[tuple[str, LossGap], ...]:
    first = next((arm for arm in logged if arm.label == baseline), logged[0])
    return tuple((arm.label, loss_gap(arm.logs, first.logs)) for arm in logged if arm is not first)


def _baseline(arms: Mapping[str, Sequence[EvalResult]], wanted: str | None) -> str:
    if wanted is None:
        return next(iter(arms))
    chosen = [label for label, results in arms.items() if wanted in (label, results[0].precision)]
    if len(chosen) != 1:
        why = "matches several runs" if chosen else "matches no run"
        raise UserError(f"baseline {wanted!r} {why}: choose one of {', '.join(arms)}.")
    return chosen[0]


def _source(result: EvalResult) -> dict[str, Any]:
    names = ("precision", "native", "backend", "hardware", "checkpoint", "suite", "seeds", "versions", "date")
    tasks = {score.task: score.version for score in result.scores}
    made = {name: getattr(result, name) for name in names}
    return {**made, "plan_hash": result.config.get("plan_hash", ""), "task_versions": tasks}


def _notes(arms: Mapping[str, Sequence[EvalResult]]) -> list[str]:
    notes = []
    emulated = [label for label, results in arms.items() if not all(result.native for result in results)]
    if emulated:
        notes.append(f"Emulated numerics: {', '.join(emulated)}. Scores are those of the format; speed is not shown.")
    for label, results in arms.items():
        skipped = {task: reason for result in results for task, reason in result.skipped.items()}
        notes += [f"{label}: {task} was skipped: {reason}." for task, reason in skipped.items()]
    checkpoints = {result.checkpoint for results in arms.values() for result in results}
    if len(checkpoints) > 1 and any(len(results) == 1 for results in arms.values()):
        notes.append(
            "Verdicts of arms with one result are about these checkpoints: the intervals hold the draw of documents, "
            "not the luck of a training seed. Give several seeds with --arm to compare ways of training."
        )
    return notes


def _pairing_notes(
    label: str, ours: EvalResult, name: str, theirs: EvalResult, common: Mapping[Key, tuple[Documents, Documents]]
) -> list[str]:
    notes = []
    for key, (documents, base) in common.items():
        shown = sum(a.prompt != b.prompt for a, b in zip(documents.samples, base.samples, strict=True))
        if shown:
            notes.append(
                f"{' '.join(key)}: {label} and {name} were shown different prompts on {shown} of {len(base.ids)} "
                "documents: few-shot examples or chat template differ, and so may the scores for that reason."
            )
        versions = ours.score(*key).version, theirs.score(*key).version
        if versions[0] != versions[1]:
            notes.append(f"{key[0]}: version {versions[0]} of the task in {label}, {versions[1]} in {name}.")
    for package in sorted(ours.versions.keys() & theirs.versions.keys()):
        if ours.versions[package] != theirs.versions[package]:
            notes.append(f"{package} {ours.versions[package]} in {label}, {theirs.versions[package]} in {name}.")
    if ours.hardware != theirs.hardware:
        notes.append(f"{label} ran on {ours.hardware or 'unknown hardware'}, {name} on {theirs.hardware or 'unknown'}.")
    return notes


def _own_agreement(name: str, reference: Mapping[Key, Documents]) -> list[str]:
    """Say how far the baseline's seeds agree among themselves: what the runs' agreement is to be held against."""
    notes = []
    for key, documents in reference.items():
        seeds = documents.choices or []
        pairs = [agreement([a], [b]) for i, a in enumerate(seeds) for b in seeds[:i]]
        if pairs:
            notes.append(f"{' '.join(key)}: two seeds of {name} give one answer on {sum(pairs) / len(pairs):.1%}.")
    return notes

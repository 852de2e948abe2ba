"""Compare evaluations paired by document: what changed, and whether it is more than noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.curves import LossGap, loss_gap
from lightning_nvfp4.evaluation.results import EvalResult, read_result
from lightning_nvfp4.evaluation.statistics import bootstrap_interval, mcnemar

if TYPE_CHECKING:
    from rich.table import Table

WITHIN_NOISE = "within noise"
SAME = "the same on every document"
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Delta:
    """One run against the baseline on one task.

    Attributes:
        run: label of the run.
        score: mean of the run.
        baseline_score: mean of the baseline on the same documents.
        delta: `score - baseline_score`.
        low, high: paired 95 % bootstrap interval of `delta`.
        gained, lost: documents that only the run, only the baseline gets right; None for metrics that are not 0 or 1.
        p: McNemar's exact p-value; None likewise.
        verdict: in words, in points (hundredths).
    """

    run: str
    score: float
    baseline_score: float
    delta: float
    low: float
    high: float
    gained: int | None
    lost: int | None
    p: float | None
    verdict: str


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
        notes: emulation, skipped tasks, different checkpoints.
        losses: relative loss gaps by run.
    """

    baseline: str
    runs: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    losses: tuple[tuple[str, LossGap], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return asdict(self)

    def write(self, path: Path) -> Path:
        """Write JSON, or Markdown where the name ends in ``.md``."""
        text = self.to_markdown() if path.suffix == ".md" else json.dumps(self.to_json(), indent=2) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def table(self) -> list[list[str]]:
        """Return the cells of the table, the header first."""
        head = ["task", "metric", "n", self.baseline]
        for run in self.runs:
            head += [run, "delta (points)", "verdict"]
        cells = [head]
        for row in self.rows:
            line = [row.task, row.metric, str(row.n), percent(row.baseline_score)]
            for delta in row.deltas:
                line += [percent(delta.score), interval_text(delta), delta.verdict]
            cells.append(line)
        return cells

    def to_markdown(self) -> str:
        """Return a Markdown table, then loss gaps and notes."""
        lines = markdown_table(self.table()) if self.rows else []
        if self.losses:
            lines += ["", *(f"- Loss of {run}: {gap.sentence()}" for run, gap in self.losses)]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def to_rich(self) -> Table:
        """Return the table for a terminal."""
        from rich.table import Table

        head, *body = self.table()
        table = Table(title=f"against {self.baseline}, paired by document, 95 % intervals")
        for name in head:
            table.add_column(name, justify="left" if name in ("task", "metric", "verdict") else "right")
        for line in body:
            table.add_row(*line)
        return table


def compare(paths: Sequence[str | Path], baseline: str | None = None) -> Comparison:
    """Compare results of `evaluate` by document.

    Args:
        paths: result files, or folders with result files in them. Two or more run
            folders with a `metrics.csv` add the loss gap to the first of them.
        baseline: label or precision of the run to compare with; None = the first path.

    Raises:
        UserError: fewer than two results, an unknown baseline, runs over different documents.
    """
    paths = [Path(path) for path in paths]
    logs = {str(path): path / "metrics.csv" for path in paths if (path / "metrics.csv").is_file()}
    files = [file for path in paths for file in _result_files(path)]
    if len(files) < 2 and len(logs) < 2:
        raise UserError(f"compare found {len(files)} results in {[str(p) for p in paths]}: need at least two.")
    comparison = Comparison("", (), ())
    if len(files) > 1:
        results = dict(zip(_labels(files), (read_result(file) for file in files), strict=True))
        comparison = compare_results(results, baseline)
    if len(logs) > 1:
        first, *others = logs
        losses = tuple((name, loss_gap(logs[name], logs[first])) for name in others)
        comparison = replace(comparison, baseline=comparison.baseline or first, losses=losses)
    return comparison


def compare_results(results: dict[str, EvalResult], baseline: str | None = None) -> Comparison:
    """Compare results in memory by label; see `compare`."""
    name = _baseline(results, baseline)
    reference = _by_task(results[name])
    others = {label: result for label, result in results.items() if label != name}
    rows = []
    notes = _notes(results)
    for (task, metric), documents in reference.items():
        score = results[name].score(task, metric)
        deltas = []
        for label, result in others.items():
            scored = _by_task(result).get((task, metric))
            if scored is None:
                notes.append(f"{label} has no {task} {metric}: {result.skipped.get(task, 'not in its suite')}.")
                continue
            _same_documents(f"{task} {metric}", name, documents, label, scored)
            deltas.append(paired_delta(label, documents, scored, score.higher_is_better))
        rows.append(Row(task, metric, len(documents), score.higher_is_better, score.value, tuple(deltas)))
    if not rows:
        raise UserError(f"{name} scored no task: nothing to compare. Evaluate it first.")
    return Comparison(name, tuple(others), tuple(rows), tuple(notes))


def paired_delta(
    run: str, baseline: dict[str, float], scored: dict[str, float], higher_is_better: bool = True
) -> Delta:
    """Compare two runs over the same documents, given as `id -> value`."""
    ids = sorted(baseline)
    pairs = [(scored[i], baseline[i]) for i in ids]
    differences = [a - b for a, b in pairs]
    delta = sum(differences) / len(ids)
    low, high = bootstrap_interval(differences)
    gained = lost = p = None
    if {value for pair in pairs for value in pair} <= {0.0, 1.0}:
        gained, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        p = mcnemar(gained, lost)
    if not any(differences):
        verdict = SAME
    elif low <= 0.0 <= high or (p is not None and p > SIGNIFICANT):
        verdict = WITHIN_NOISE
    else:
        better = (delta > 0) == higher_is_better
        verdict = f"{'better' if better else 'worse'} by {100 * abs(delta):.1f} ± {50 * (high - low):.1f}"
    means = (sum(a for a, _ in pairs) / len(ids), sum(b for _, b in pairs) / len(ids))
    return Delta(run, means[0], means[1], delta, low, high, gained, lost, p, verdict)


def percent(value: float) -> str:
    """Format a score of 0 to 1 in points."""
    return f"{100 * value:.1f}"


def interval_text(delta: Delta) -> str:
    """Format a delta and its interval in points."""
    return f"{100 * delta.delta:+.1f} [{100 * delta.low:+.1f}, {100 * delta.high:+.1f}]"


def markdown_table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, the first row its header."""
    head, *body = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in cells]
    return [head, "|" + "---|" * len(cells[0]), *body]


def _result_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.glob("*.json") if p.with_suffix(".samples.jsonl").is_file())
    if not path.is_file():
        raise UserError(f"{path}: no such result. Give a .json file that nvfp4 eval wrote, or its folder.")
    return [path]


def _labels(files: Sequence[Path]) -> list[str]:
    """Return the shortest tails of the paths that tell them apart."""
    parts = [(*file.parts[:-1], file.stem) for file in files]
    for depth in range(1, max((len(p) for p in parts), default=0) + 1):
        labels = ["/".join(p[-depth:]) for p in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise UserError(f"the same result is given twice: {', '.join(map(str, files))}. Name each once.")


def _baseline(results: dict[str, EvalResult], wanted: str | None) -> str:
    if wanted is None:
        return next(iter(results))
    chosen = [label for label, result in results.items() if wanted in (label, result.precision)]
    if len(chosen) != 1:
        why = "matches several runs" if chosen else "matches no run"
        raise UserError(f"baseline {wanted!r} {why}: choose one of {', '.join(results)}.")
    return chosen[0]


def _by_task(result: EvalResult) -> dict[tuple[str, str], dict[str, float]]:
    tasks: dict[tuple[str, str], dict[str, float]] = {}
    for sample in result.samples:
        tasks.setdefault((sample.task, sample.metric), {})[sample.id] = sample.value
    return tasks


def _same_documents(what: str, name: str, a: dict[str, float], label: str, b: dict[str, float]) -> None:
    if a.keys() != b.keys():
        raise UserError(
            f"{what}: {name} and {label} scored different documents ({len(a)} and {len(b)}, {len(a.keys() & b.keys())} "
            "in common): evaluate both with the same suite, --seed and --limit."
        )


def _notes(results: dict[str, EvalResult]) -> list[str]:
    notes = []
    emulated = [label for label, result in results.items() if not result.native]
    if emulated:
        notes.append(f"Emulated numerics: {', '.join(emulated)}. Scores are those of the format; speed is not shown.")
    for label, result in results.items():
        notes += [f"{label}: {task} was skipped: {reason}." for task, reason in result.skipped.items()]
    return notes

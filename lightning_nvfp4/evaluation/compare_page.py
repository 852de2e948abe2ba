"""A comparison for readers: tables for a terminal, a page as HTML and Markdown, the data as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.compare import Comparison
from lightning_nvfp4.evaluation.page import Block, Bullets, Heading, Plot, Table, Text, to_html, to_markdown
from lightning_nvfp4.evaluation.paired import Delta, Interval

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SUFFIXES = (".html", ".md", ".json")

_HOW = (
    "Paired by document. Verdicts: p-values (McNemar's exact test for right and wrong, sign flips for graded scores, "
    "Student's t where an arm has several seeds) are corrected by Holm's method for the {tasks} of a run; better or "
    "worse needs a corrected p of 0.05 or less and an interval without 0. Intervals: 95 %, each for itself (score "
    "interval for right and wrong, bootstrap otherwise). Detectable: the smallest true difference that this many "
    "documents show in 4 of 5 such comparisons."
)


def write(comparison: Comparison, out: Path) -> list[Path]:
    """Write the comparison to `out`, in the form of its ending, or as ``compare.*`` in every form into a folder.

    Raises:
        UserError: another ending.
    """
    if out.suffix and out.suffix not in SUFFIXES:
        raise UserError(f"--out {str(out)!r} must end in {', '.join(SUFFIXES)}, or name a folder for all of them.")
    paths = [out] if out.suffix else [out / f"compare{suffix}" for suffix in SUFFIXES]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(_text(comparison, path.suffix), encoding="utf-8")
        temporary.replace(path)
    return paths


def _text(comparison: Comparison, suffix: str) -> str:
    if suffix == ".json":
        return json.dumps(comparison.to_json(), indent=2) + "\n"
    title = f"{', '.join(comparison.runs) or 'Runs'} against {comparison.baseline}"
    lead = explanation(comparison) if comparison.rows else "Relative gap of the training loss."
    return (to_html if suffix == ".html" else to_markdown)(title, lead, page_blocks(comparison, suffix == ".html"))


def page_blocks(comparison: Comparison, plots: bool = True) -> list[Block]:
    """Return the page's blocks; without `plots`, which take a second, those are left out."""
    blocks: list[Block] = []
    if comparison.rows:
        blocks += [Heading("Scores"), Table(score_cells(comparison))]
    if plots:
        from lightning_nvfp4.evaluation.compare_plots import delta_plot, gap_plot

        if svg := delta_plot(comparison):
            caption = f"Differences from {comparison.baseline}; bars: 95 % intervals, not corrected for their number."
            blocks.append(Plot(svg, caption))
    if len(cells := early_cells(comparison)) > 1:
        caption = (
            "The reference answer's mean log-likelihood, and the ratio of perplexities that it means; below 0 and "
            "above 1 the run is worse. Paired 95 % intervals, without correction or verdict."
        )
        blocks += [Heading("What moves before scores do"), Table(cells, caption)]
    if len(cells := perplexity_cells(comparison)) > 1:
        blocks += [Heading("Perplexity of running text"), Table(cells, "Bootstrap over documents.")]
    if comparison.losses:
        blocks.append(Heading("Training loss"))
        if plots and (svg := gap_plot(comparison)):
            blocks.append(Plot(svg, "Of the trailing means over a twentieth of the run."))
        blocks += [Text(f"Loss of {run}: {gap.sentence()}.") for run, gap in comparison.losses]
    if comparison.notes:
        blocks += [Heading("Before you trust this"), Bullets(comparison.notes)]
    if comparison.sources:
        blocks += [Heading("How it was run"), Table(_source_cells(comparison))]
    return blocks


def score_cells(comparison: Comparison) -> list[list[str]]:
    """Return a line for each task, metric and run."""
    cells = [["task", "metric", "documents", "run", "score", comparison.baseline, "delta [95 %]", "gained / lost"]]
    cells[0] += ["p", "p, Holm", "detectable", "verdict"]
    for row in comparison.rows:
        for delta in row.deltas:
            line = [row.task, row.metric, str(row.n), delta.run, score_text(delta, delta.score)]
            line += [score_text(delta, delta.baseline_score), interval_text(delta)]
            line.append("" if delta.gained is None else f"+{delta.gained} / -{delta.lost}")
            line += [_p(delta.p), _p(delta.p_holm), score_text(delta, delta.detectable), delta.verdict]
            cells.append(line)
    return cells


def early_cells(comparison: Comparison) -> list[list[str]]:
    """Return a line for each task, metric and run whose documents carry answers or their likelihoods."""
    cells = [["task", "metric", "run", "same answer", "log-likelihood, nats [95 %]", "perplexity ratio [95 %]"]]
    for row in comparison.rows:
        for delta in row.deltas:
            if delta.same_answer is None and delta.logprob is None:
                continue
            same = "" if delta.same_answer is None else f"{100 * delta.same_answer:.1f} %"
            logprob = "" if delta.logprob is None else _interval(delta.logprob, "+.4f")
            ratio = "" if delta.perplexity_ratio is None else _interval(delta.perplexity_ratio, ".4f")
            cells.append([row.task, row.metric, delta.run, same, logprob, ratio])
    return cells


def perplexity_cells(comparison: Comparison) -> list[list[str]]:
    """Return a line for each perplexity of running text and run."""
    cells = [["task", "metric", "run", "value", comparison.baseline, "ratio [95 %]"]]
    for one in comparison.perplexities:
        ratio = f"{one.ratio:.4f}" if one.interval is None else _interval(one.interval, ".4f")
        cells.append([one.task, one.metric, one.run, f"{one.value:.4f}", f"{one.baseline:.4f}", ratio])
    return cells


def rich_tables(comparison: Comparison) -> list[RichTable]:
    """Return the tables for a terminal."""
    from rich.table import Table as RichTable

    tables = []
    for title, cells in (
        (f"against {comparison.baseline}", score_cells(comparison)),
        ("what moves before scores do", early_cells(comparison)),
        ("perplexity of running text", perplexity_cells(comparison)),
    ):
        if len(cells) == 1:
            continue
        table = RichTable(title=title, title_justify="left", box=None, pad_edge=False)
        for name in cells[0]:
            left = name in ("task", "metric", "run", "verdict")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        for line in cells[1:]:
            table.add_row(*line)
        tables.append(table)
    return tables


def explanation(comparison: Comparison) -> str:
    """Return how verdicts came about, in words."""
    runs = [delta.run for row in comparison.rows for delta in row.deltas]
    count = max(map(runs.count, comparison.runs), default=0)
    return _HOW.format(tasks="one task" if count == 1 else f"{count} tasks and metrics")


def score_text(delta: Delta, value: float) -> str:
    """Format a score of `delta`: in points where its scores are shares."""
    return f"{100 * value:.1f}" if delta.in_points else f"{value:.4g}"


def interval_text(delta: Delta) -> str:
    """Format a delta and its interval, in points where its scores are shares."""
    scale, form = (100, "+.1f") if delta.in_points else (1, "+.4f")
    return _interval(Interval(*(scale * value for value in (delta.delta, delta.low, delta.high))), form)


def _interval(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _source_cells(comparison: Comparison) -> list[list[str]]:
    names = list(comparison.sources[0][1])
    cells = [["", *(label for label, _ in comparison.sources)]]
    return cells + [[name, *(_joined(source[name]) for _, source in comparison.sources)] for name in names]


def _joined(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no, emulated"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "not recorded"
    return str(value) or "not recorded"

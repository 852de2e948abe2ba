"""The plots of a comparison, as SVG text to be put into the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lightning_nvfp4.evaluation.compare import Comparison
from lightning_nvfp4.evaluation.paired import Delta
from lightning_nvfp4.evaluation.plots import BASELINE, PALETTE, STYLE, to_svg

Reach = Callable[[Delta], tuple[float, float, float] | None]
"""What is drawn of a delta: value, low, high."""


def delta_plot(comparison: Comparison) -> str | None:
    """Draw each task's difference in points with its interval, and beside it what moves before scores do."""
    rows = [row for row in comparison.rows if any(delta.in_points for delta in row.deltas)]
    if not rows:
        return None
    panels: list[tuple[str, Reach]] = [
        ("score, points", lambda d: (100 * d.delta, 100 * d.low, 100 * d.high) if d.in_points else None),
        (
            "log-likelihood of the answer, nats",
            lambda d: d.logprob and (d.logprob.value, d.logprob.low, d.logprob.high),
        ),
        (
            "documents with another answer, %",
            lambda d: None if d.same_answer is None else _thrice(100 * (1 - d.same_answer)),
        ),
    ]
    panels = [(title, read) for title, read in panels if any(read(d) for row in rows for d in row.deltas)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 1.3 + 0.34 * len(rows) + 0.12 * len(rows) * len(comparison.runs)))
        figure.set_layout_engine("constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (title, read) in zip(axes, panels, strict=True):
            axis.axvline(0, color=BASELINE, linewidth=1)
            for number, run in enumerate(comparison.runs):
                _points(axis, comparison, rows, run, number, read)
            axis.set_xlabel(title)
        axes[0].set_yticks(range(len(rows)), [f"{row.task} {row.metric}" for row in rows])
        axes[0].set_ylim(len(rows) - 0.5, -0.5)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(comparison.runs))
        return to_svg(figure, f"Differences from {comparison.baseline} with 95 % intervals")


def _thrice(value: float) -> tuple[float, float, float]:
    return value, value, value


def _points(axis: Any, comparison: Comparison, rows: list[Any], run: str, number: int, read: Reach) -> None:
    shift = 0.5 * ((number + 0.5) / len(comparison.runs) - 0.5)
    found = [(y + shift, r) for y, row in enumerate(rows) for d in row.deltas if d.run == run and (r := read(d))]
    axis.errorbar(
        [value for _, (value, _, _) in found],
        [y for y, _ in found],
        xerr=[[v - low for _, (v, low, _) in found], [high - v for _, (v, _, high) in found]],
        color=PALETTE[number % len(PALETTE)],
        linestyle="none",
        marker="o",
        markersize=4,
        elinewidth=1.3,
        label=run,
    )


def gap_plot(comparison: Comparison) -> str | None:
    """Draw the relative loss gap to the baseline over steps."""
    if not comparison.losses:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 2.8), layout="constrained")
        axis = figure.subplots()
        axis.axhline(0, color=BASELINE, linewidth=1)
        for number, (run, gap) in enumerate(comparison.losses):
            axis.plot(gap.steps, gap.relative, color=PALETTE[number % len(PALETTE)], linewidth=1.4, label=run)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
        axis.set_xlabel("optimizer step")
        axis.set_ylabel("(loss - baseline) / baseline")
        axis.legend(loc="upper right")
        return to_svg(figure, "Relative gap of the training loss")

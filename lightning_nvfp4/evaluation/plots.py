"""The report's plots, as SVG text to be put into the page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lightning_nvfp4.evaluation.report_data import LOSS, REWARD, RunFolder

PALETTE = ("#0a7d4f", "#d1603d", "#2f6fb0", "#8a4fa3", "#b08900", "#5a8f8f")
BASELINE = "#4a4f57"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": "#3a3f47",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e8eaee",
    "xtick.color": "#5b626c",
    "ytick.color": "#5b626c",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "nvfp4",
}


def colours(run: RunFolder) -> dict[str, str]:
    """Return each arm's colour; the baseline is grey."""
    others = [arm for arm in run.arms if arm != run.baseline]
    return {run.baseline: BASELINE} | {arm: PALETTE[i % len(PALETTE)] for i, arm in enumerate(others)}


def loss_plot(run: RunFolder, stages: Sequence[str]) -> str | None:
    """Draw training loss over steps for each stage in `stages`, with the relative gap to the baseline below it.

    The gap is `(loss - baseline) / baseline` of the smoothed curves (the definition of arXiv:2509.25149, figure 2).
    """
    shown = [stage for stage in stages if any(LOSS in run.curves.get((arm, stage), {}) for arm in run.arms)]
    if not shown:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        axes = figure.subplots(2, len(shown), squeeze=False, height_ratios=(2, 1.25), sharex="col")
        for column, stage in enumerate(shown):
            top, bottom = axes[0][column], axes[1][column]
            _losses(run, stage, top, bottom)
            top.set_title(stage)
            bottom.set_xlabel("optimizer step")
        axes[0][0].set_ylabel("training loss")
        axes[1][0].set_ylabel("gap to baseline")
        axes[0][-1].legend(loc="upper right")
        return to_svg(figure, "Training loss of each arm and its relative gap to the baseline")


def _losses(run: RunFolder, stage: str, top: Any, bottom: Any) -> None:
    tint = colours(run)
    for arm in run.arms:
        curve = run.curves.get((arm, stage), {}).get(LOSS)
        if curve is None:
            top.plot([], [], color=tint[arm], linestyle=":", label=f"{arm} (missing)")
            continue
        smooth = curve.smoothed()
        top.plot(curve.steps, curve.values, color=tint[arm], alpha=0.16, linewidth=0.8)
        top.plot(smooth.steps, smooth.values, color=tint[arm], linewidth=1.6, label=arm)
    bottom.axhline(0, color=BASELINE, linewidth=1)
    for (arm, of), gap in run.gaps.items():
        if of == stage:
            bottom.plot(gap.steps, gap.relative, color=tint[arm], linewidth=1.3)
    settled = [v for (_, of), gap in run.gaps.items() if of == stage for v in gap.relative[len(gap.relative) // 10 :]]
    if settled:  # the first steps of a run may differ by far more than any later one
        low, high = min(0.0, *settled), max(0.0, *settled)
        margin = 0.15 * (high - low) or 0.001
        bottom.set_ylim(low - margin, high + margin)
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    bottom.yaxis.set_major_locator(MaxNLocator(4))
    bottom.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def reward_plot(run: RunFolder) -> str | None:
    """Draw the mean reward of each RL step."""
    if not any(REWARD in run.curves.get((arm, "rl"), {}) for arm in run.arms):
        return None
    tint = colours(run)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.1), layout="constrained")
        axis = figure.subplots()
        for arm in run.arms:
            curve = run.curves.get((arm, "rl"), {}).get(REWARD)
            if curve is None:
                axis.plot([], [], color=tint[arm], linestyle=":", label=f"{arm} (missing)")
                continue
            smooth = curve.smoothed(5)
            axis.plot(curve.steps, curve.values, color=tint[arm], alpha=0.25, linewidth=0.9)
            axis.plot(smooth.steps, smooth.values, color=tint[arm], linewidth=1.8, label=arm)
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axis.set_xlabel("RL step")
        axis.set_ylabel("mean reward")
        axis.legend(loc="lower right")
        return to_svg(figure, "Mean reward over RL steps")


def score_plot(run: RunFolder) -> str | None:
    """Draw each task's score after each evaluated stage, with a bar of one standard error either way."""
    tasks, stages = run.tasks(), run.evaluated_stages()
    if not tasks:
        return None
    tint = colours(run)
    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 2.5 * rows + 0.35), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        for axis, (task, metric) in zip(axes, tasks, strict=False):
            for number, arm in enumerate(run.arms):
                points = []
                for place, stage in enumerate(stages):
                    for score in run.results[arm, stage].scores if (arm, stage) in run.results else ():
                        if (score.task, score.metric) == (task, metric):
                            points.append((place + 0.06 * (number - (len(run.arms) - 1) / 2), score))
                axis.errorbar(
                    [x for x, _ in points],
                    [score.value for _, score in points],
                    yerr=[score.stderr or 0.0 for _, score in points],
                    color=tint[arm],
                    linewidth=1.4,
                    elinewidth=1,
                    marker="o",
                    markersize=4,
                    label=arm,
                )
            axis.set_title(task)
            axis.set_xticks(range(len(stages)), stages)
            axis.set_xlim(-0.35, len(stages) - 0.65)
            axis.set_ylim(-0.02, 1.04)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for axis in axes[len(tasks) :]:
            axis.set_visible(False)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(run.arms))
        return to_svg(figure, "Scores of each task after each stage")


def to_svg(figure: Figure, title: str) -> str:
    """Return `figure` as an SVG element."""
    stream = io.StringIO()
    # No date: the same data give the same file.
    figure.savefig(stream, format="svg", metadata={"Date": None, "Title": title}, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :]

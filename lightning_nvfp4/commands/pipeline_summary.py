"""The table at the end of a pipeline, from the report's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_summary(report: Path, console: Console) -> None:
    """Print losses and rewards by arm, then scores by task and stage.

    Args:
        report: `report.json`.
        console: where to.
    """
    content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    console.print()
    console.print(_training(content))
    scores = _scores(content)
    if scores.row_count:
        console.print()
        console.print(scores)
    for line in content["missing"]:
        console.print(f"missing: {line}", markup=False, soft_wrap=True)


def _training(content: dict[str, Any]) -> Table:
    stages = [stage for stage in content["stages"] if any(stage in losses for losses in content["losses"].values())]
    table = Table(box=None, pad_edge=False)
    table.add_column("arm")
    kinds = {stage: _kind(content, stage) for stage in stages}
    for stage in stages:
        table.add_column(f"{'val loss' if kinds[stage] == 'validation' else 'loss'} {stage}", justify="right")
        table.add_column("gap", justify="right")
    table.add_column("RL reward", justify="right")
    for arm in content["arms"]:
        cells = [arm]
        for stage in stages:
            loss = content["losses"].get(arm, {}).get(stage)
            gap = content["loss_gaps"].get(arm, {}).get(stage)
            cells.append("-" if loss is None else f"{loss[kinds[stage]]:.3f}")
            cells.append("" if gap is None else f"{gap[kinds[stage]]:+.2%}")
        reward = content["rewards"].get(arm)
        cells.append("-" if reward is None else f"{reward['first']:.3f} -> {reward['last']:.3f}")
        table.add_row(*cells)
    return table


def _kind(content: dict[str, Any], stage: str) -> str:
    """Return which loss of a stage to show: of held-out text where every arm has it, else of training."""
    losses = [arm[stage] for arm in content["losses"].values() if stage in arm]
    return "validation" if all(loss["validation"] is not None for loss in losses) else "final"


def _scores(content: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("stage")
    for arm in content["arms"]:
        table.add_column(arm, justify="right")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for arm in content["arms"]:
        for stage in content["stages"]:
            for score in content["scores"].get(arm, {}).get(stage, ()):
                error = "" if score["stderr"] is None else f" ± {score['stderr']:.3f}"
                cells.setdefault((score["task"], stage), {})[arm] = f"{score['value']:.3f}{error}"
    order = {stage: index for index, stage in enumerate(content["stages"])}
    for task, stage in sorted(cells, key=lambda key: (key[0], order[key[1]])):
        table.add_row(task, stage, *(cells[task, stage].get(arm, "-") for arm in content["arms"]))
    return table

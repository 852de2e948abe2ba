"""Collects a run folder into one plain structure, which the report is written from.

    OUT/<arm>/<stage>/metrics.csv           training logs
    OUT/<arm>/eval/<stage>.json             evaluations, with .samples.jsonl
    OUT/<arm>/job.json                      says that the arm was planned, whatever became of it
    OUT/pipeline.json                       the pipeline's record; its keys `stages.<name>.name` give the stage order

What is not there is listed as missing; nothing is left out silently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.compare import Comparison, compare_results
from lightning_nvfp4.evaluation.curves import Curve, LossGap, gap, read_curves
from lightning_nvfp4.evaluation.results import EvalResult, read_result

STAGES = ("pretrain", "decay", "sft", "rl")
LOSS, REWARD = "train/loss", "rl/reward"
REWARD_STEPS = 10  # first and last steps whose mean reward is reported


@dataclass(frozen=True)
class RunFolder:
    """A pipeline's results.

    Attributes:
        arms: names, the baseline last.
        stages: names in order.
        baseline: arm that losses are compared with.
        references: arms that scores are compared with, the baseline first.
        curves: (arm, stage) -> column -> curve.
        results: (arm, stage) -> evaluation.
        gaps: (arm, stage) -> relative loss gap to the baseline.
        comparisons: (stage, reference) -> comparison of the other arms.
        missing: what was looked for and is not there, in words.
    """

    arms: tuple[str, ...]
    stages: tuple[str, ...]
    baseline: str
    references: tuple[str, ...]
    curves: dict[tuple[str, str], dict[str, Curve]]
    results: dict[tuple[str, str], EvalResult]
    gaps: dict[tuple[str, str], LossGap] = field(default_factory=dict)
    comparisons: dict[tuple[str, str], Comparison] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def reward(self, arm: str) -> tuple[float, float] | None:
        """Return the mean reward of the first and of the last ten RL steps."""
        curve = self.curves.get((arm, "rl"), {}).get(REWARD)
        return None if curve is None else (curve.start(REWARD_STEPS), curve.end(REWARD_STEPS))

    def tasks(self) -> list[tuple[str, str]]:
        """Return every (task, metric) that some evaluation scored, in its order."""
        found: dict[tuple[str, str], None] = {}
        for result in self.results.values():
            for score in result.scores:
                found.setdefault((score.task, score.metric))
        return list(found)

    def evaluated_stages(self) -> list[str]:
        """Return the stages with an evaluation in some arm."""
        return [stage for stage in self.stages if any((arm, stage) in self.results for arm in self.arms)]


def collect(out: Path, baseline: str | None = None, references: Sequence[str] = ("bf16-gemm", "mxfp8")) -> RunFolder:
    """Read the run folder `out`.

    Args:
        out: folder of a pipeline.
        baseline: arm; None = ``bf16-gemm``, else the last arm.
        references: arms to compare scores with, where they are there.

    Raises:
        UserError: no folder, or no stage of any arm in it.
    """
    record = _record(out)
    planned = [key.split(".")[1] for key in record if key.startswith("stages.") and key.endswith(".name")]
    stages = tuple(planned) or STAGES
    arms = _arms(out, stages)
    if not arms:
        raise UserError(f"{out}: no <arm>/<stage>/metrics.csv and no <arm>/eval/*.json: give the folder of a pipeline.")
    baseline = baseline or ("bf16-gemm" if "bf16-gemm" in arms else arms[-1])
    if baseline not in arms:
        raise UserError(f"{out}: baseline {baseline!r} is not among its arms {', '.join(arms)}: name one of them.")
    arms = [*(arm for arm in arms if arm != baseline), baseline]
    missing: list[str] = []
    curves: dict[tuple[str, str], dict[str, Curve]] = {}
    results: dict[tuple[str, str], EvalResult] = {}
    for arm in arms:
        for stage in stages:
            log = out / arm / stage / "metrics.csv"
            if log.is_file():
                curves[arm, stage] = read_curves(log)
                if record and not (out / arm / stage / "done.json").is_file():
                    missing.append(f"{arm}: stage {stage} has not finished.")
            else:
                missing.append(f"{arm}: stage {stage} was not run.")
            path = out / arm / "eval" / f"{stage}.json"
            if path.is_file():
                results[arm, stage] = read_result(path)
    evaluated = {stage for _, stage in results}
    missing += [
        f"{arm}: stage {stage} was not evaluated."
        for arm in arms
        for stage in stages
        if stage in evaluated and (arm, stage) not in results
    ]
    present = [name for name in dict.fromkeys((baseline, *references)) if name in arms]
    gaps = _gaps(arms, stages, baseline, curves, missing)
    comparisons = _comparisons(arms, stages, present, results, missing)
    return RunFolder(tuple(arms), stages, baseline, tuple(present), curves, results, gaps, comparisons, tuple(missing))


def _gaps(
    arms: Sequence[str],
    stages: Sequence[str],
    baseline: str,
    curves: dict[tuple[str, str], dict[str, Curve]],
    missing: list[str],
) -> dict[tuple[str, str], LossGap]:
    gaps = {}
    for stage in stages:
        base = curves.get((baseline, stage), {})
        for arm in arms:
            ours = curves.get((arm, stage), {})
            if arm != baseline and LOSS in ours and LOSS in base:
                try:
                    gaps[arm, stage] = gap(ours, base, LOSS, names=(f"{arm}/{stage}", f"{baseline}/{stage}"))
                except UserError as error:
                    missing.append(f"{error}")
    return gaps


def _comparisons(
    arms: Sequence[str],
    stages: Sequence[str],
    references: Sequence[str],
    results: dict[tuple[str, str], EvalResult],
    missing: list[str],
) -> dict[tuple[str, str], Comparison]:
    comparisons = {}
    for stage in stages:
        scored = {arm: results[arm, stage] for arm in arms if (arm, stage) in results}
        for reference in references:
            if reference in scored and len(scored) > 1 and scored[reference].scores:
                try:
                    comparisons[stage, reference] = compare_results(scored, reference)
                except UserError as error:
                    missing.append(f"{stage}: no comparison with {reference}: {error}")
    return comparisons


def _record(out: Path) -> dict[str, Any]:
    if not out.is_dir():
        raise UserError(f"{out}: no such folder: give the folder of a pipeline.")
    path = out / "pipeline.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}). Run the pipeline again.") from error
    return content if isinstance(content, dict) else {}


def _arms(out: Path, stages: Sequence[str]) -> list[str]:
    def holds_results(folder: Path) -> bool:
        logs = (folder / stage / "metrics.csv" for stage in stages)
        return (folder / "job.json").is_file() or (folder / "eval").is_dir() or any(log.is_file() for log in logs)

    return [folder.name for folder in sorted(out.iterdir()) if folder.is_dir() and holds_results(folder)]

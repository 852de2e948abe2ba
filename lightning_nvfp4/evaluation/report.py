"""The report of a pipeline: what 4 bits cost against the other arms, as HTML, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_nvfp4.evaluation import plots
from lightning_nvfp4.evaluation.compare_page import interval_text
from lightning_nvfp4.evaluation.curves import VALIDATION, Curve
from lightning_nvfp4.evaluation.numerics_plots import numerics_plot
from lightning_nvfp4.evaluation.page import Block, Bullets, Heading, Plot, Table, to_html, to_markdown
from lightning_nvfp4.evaluation.report_data import LOSS, REWARD_STEPS, RunFolder, collect

MISSING = "missing"
TITLE = "What 4 bits cost"


def write_report(out: Path, *, baseline: str | None = None, notes: Sequence[str] = ()) -> Path:
    """Write `report.html`, `report.md` and `report.json` into the run folder `out`; return the HTML file.

    Args:
        out: folder of a pipeline, laid out as `report_data` says.
        baseline: arm that losses are compared with; None = ``bf16-gemm``.
        notes: what a reader should know about this run, in words, shown first among the remarks.

    Raises:
        UserError: no run in the folder, or an unknown baseline.
    """
    out = Path(out)
    run = collect(out, baseline)
    about = _about(run)
    lead = _lead(run, about)
    blocks = _blocks(run, about, notes)
    page = out / "report.html"
    for path, text in (
        (page, to_html(TITLE, lead, blocks)),
        (out / "report.md", to_markdown(TITLE, lead, blocks)),
        (out / "report.json", json.dumps(_json(run, about, notes), indent=2) + "\n"),
    ):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return page


def _blocks(run: RunFolder, about: dict[str, Any], notes: Sequence[str]) -> list[Block]:
    blocks: list[Block] = [Table(_summary(run), _summary_caption(run))]
    if run.missing:
        blocks.append(Bullets(tuple(f"Missing: {line}" for line in run.missing), warning=True))
    blocks += [Heading("Before you trust this"), *_remarks(run, about, notes)]
    if svg := plots.loss_plot(run, [s for s in run.stages if s != "rl"]):
        caption = f"Bold: trailing mean over a twentieth of the stage. Gap: (loss - {run.baseline}) / {run.baseline}."
        blocks += [
            Heading("Training loss"),
            Plot(svg, caption),
            Table(_losses(run), "Means over each stage's last tenth."),
        ]
    if numerics := _numerics(run):
        blocks += [Heading("Numerics by layer"), numerics]
    if svg := plots.reward_plot(run):
        blocks += [
            Heading("Reinforcement learning"),
            Plot(svg, "Mean reward of each step's samples; bold: over 5 steps."),
        ]
        blocks.append(Table(_rewards(run)))
    if svg := plots.score_plot(run):
        blocks += [Heading("Downstream scores"), Plot(svg, "Bars: one standard error either way.")]
        blocks.append(Table(_scores(run), "Points of 100, ± one standard error. decay = before SFT."))
    for reference in run.references:
        blocks += _deltas(run, reference)
    blocks += [Heading("How it was run"), Table(_about_table(about))]
    return blocks


def _numerics(run: RunFolder) -> Plot | None:
    """Return the picture of the last stage of the first arm that logged `NumericsMonitor`."""
    for arm in run.arms:
        for stage in reversed(run.stages):
            if svg := numerics_plot(run.curves.get((arm, stage), {})):
                return Plot(svg, f"{arm}, {stage}, the last observation.")
    return None


def _summary(run: RunFolder) -> list[list[str]]:
    stages = [s for s in run.stages if s != "rl"]
    last = next((s for s in reversed(stages) if any((arm, s) in run.gaps for arm in run.arms)), None)
    pretraining = "decay" if any((arm, "decay") in run.gaps for arm in run.arms) else last
    gaps = {arm: run.gaps.get((arm, pretraining or "")) for arm in run.arms}
    # Held-out text where there is some: the mean over the last batches carries their noise too.
    validated = all(gap is None or gap.validation is not None for gap in gaps.values())
    kind = "validation" if validated else "training"
    head = [
        "arm",
        f"{kind} loss gap, {pretraining or 'training'}",
        f"reward, first {REWARD_STEPS} → last {REWARD_STEPS} steps",
    ]
    evaluated = run.evaluated_stages()
    final = evaluated[-1] if evaluated else None
    tasks = run.tasks()
    head += [f"{task} after {final}" for task, _ in tasks]
    rows = [head]
    for arm in run.arms:
        gap, reward = gaps[arm], run.reward(arm)
        value = None if gap is None else gap.validation if validated else gap.final
        line = [arm, "baseline" if arm == run.baseline else MISSING if value is None else f"{100 * value:+.2f} %"]
        line.append(MISSING if reward is None else f"{reward[0]:.3f} → {reward[1]:.3f}")
        line += [_score_text(run, arm, final, task, metric) for task, metric in tasks]
        rows.append(line)
    return rows


def _summary_caption(run: RunFolder) -> str:
    return f"Loss gaps are relative to {run.baseline}. Scores in points of 100, ± one standard error."


def _losses(run: RunFolder) -> list[list[str]]:
    rows = [["stage", "arm", "first loss", "final loss", f"gap to {run.baseline}", "validation loss", "validation gap"]]
    for stage in run.stages:
        if stage == "rl":
            continue
        for arm in run.arms:
            curves = run.curves.get((arm, stage), {})
            if LOSS not in curves:
                rows.append([stage, arm, *[MISSING] * 5])
                continue
            gap = run.gaps.get((arm, stage))
            val = _last(curves.get(VALIDATION))
            rows.append(
                [
                    stage,
                    arm,
                    f"{curves[LOSS].start(1):.3f}",
                    f"{curves[LOSS].end():.4f}",
                    "baseline" if arm == run.baseline else MISSING if gap is None else f"{100 * gap.final:+.2f} %",
                    "not logged" if val is None else f"{val:.4f}",
                    "" if gap is None or gap.validation is None else f"{100 * gap.validation:+.2f} %",
                ]
            )
    return rows


def percent(value: float) -> str:
    """Format a score of 0 to 1 in points."""
    return f"{100 * value:.1f}"


def _last(curve: Curve | None) -> float | None:
    return None if curve is None else curve.values[-1]


def _rewards(run: RunFolder) -> list[list[str]]:
    rows = [["arm", f"first {REWARD_STEPS} steps", f"last {REWARD_STEPS} steps", "change"]]
    for arm in run.arms:
        reward = run.reward(arm)
        if reward is None:
            rows.append([arm, *[MISSING] * 3])
        else:
            rows.append([arm, f"{reward[0]:.3f}", f"{reward[1]:.3f}", f"{reward[1] - reward[0]:+.3f}"])
    return rows


def _scores(run: RunFolder) -> list[list[str]]:
    stages = run.evaluated_stages()
    rows = [["task", "metric", "documents", "arm", *(f"after {stage}" for stage in stages)]]
    for task, metric in run.tasks():
        counts = {s.n for r in run.results.values() for s in r.scores if (s.task, s.metric) == (task, metric)}
        for arm in run.arms:
            cells = [_score_text(run, arm, stage, task, metric) for stage in stages]
            rows.append([task, metric, "/".join(map(str, sorted(counts))), arm, *cells])
    return rows


def _score_text(run: RunFolder, arm: str, stage: str | None, task: str, metric: str) -> str:
    result = run.results.get((arm, stage or ""))
    if result is None:
        return MISSING
    for score in result.scores:
        if (score.task, score.metric) == (task, metric):
            return percent(score.value) + ("" if score.stderr is None else f" ± {percent(score.stderr)}")
    return "skipped" if task in result.skipped else MISSING


def _deltas(run: RunFolder, reference: str) -> list[Block]:
    rows = []
    for stage in run.evaluated_stages():
        comparison = run.comparisons.get((stage, reference))
        for row in comparison.rows if comparison else ():
            for delta in row.deltas:
                changed = "" if delta.gained is None else f"+{delta.gained} / -{delta.lost}"
                p = f"{delta.p:.3f}"
                cells = [stage, row.task, delta.run, percent(row.baseline_score), percent(delta.score)]
                rows.append([*cells, interval_text(delta), changed, p, delta.verdict])
    if not rows:
        return []
    head = ["after", "task", "arm", reference, "score", "delta [95 %]", "gained / lost", "p", "verdict"]
    caption = (
        "Paired by document; 95 % interval of the difference in points; p of McNemar's exact test. Verdicts are "
        "corrected by Holm's method for the tasks of an arm after a stage; p and intervals are not. They cover the "
        "draw of documents, not of training seeds."
    )
    return [Heading(f"Against {reference}, document by document"), Table([head, *rows], caption)]


def _remarks(run: RunFolder, about: dict[str, Any], notes: Sequence[str]) -> list[Block]:
    lines = list(notes)
    if about["emulated"]:
        lines.append(
            f"Emulated here: {', '.join(about['emulated'])}. The numerics are those of the format, bit for bit; the "
            "times are those of the emulation, so none are shown as a speed."
        )
    lines.append(
        "One seed an arm: differences between arms include the luck of a training run, which the intervals do not "
        "hold. Rank formats by many seeds, not by this page."
        if len(run.arms) > 1
        else "One arm: nothing to compare with."
    )
    for (arm, stage), result in run.results.items():
        lines += [f"{arm} after {stage}: {note}" for note in result.notes if "exactly 0" in note]
    skipped = {f"{task}: {reason}" for result in run.results.values() for task, reason in result.skipped.items()}
    lines += [f"Skipped: {line}." for line in sorted(skipped)]
    return [Bullets(tuple(lines))]


def _about(run: RunFolder) -> dict[str, Any]:
    results = list(run.results.values())
    emulated = sorted({arm for (arm, _), r in run.results.items() if not r.native})
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": sorted({r.hardware for r in results if r.hardware}),
        "versions": {k: v for r in results for k, v in r.versions.items()},
        "seeds": {k: v for r in results for k, v in r.seeds.items()},
        "suites": sorted({r.suite for r in results}),
        "backends": sorted({r.backend for r in results}),
        "emulated": emulated,
        "evaluated": sorted({r.date[:10] for r in results if r.date}),
    }


def _about_table(about: dict[str, Any]) -> list[list[str]]:
    def joined(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{k} {v}" for k, v in value.items())
        return ", ".join(value) if isinstance(value, list) else str(value)

    names = ("hardware", "backends", "emulated", "suites", "seeds", "versions", "evaluated", "written")
    return [["", ""], *([name, joined(about[name]) or "not recorded"] for name in names)]


def _lead(run: RunFolder, about: dict[str, Any]) -> str:
    where = ", ".join(about["hardware"]) or "hardware not recorded"
    return f"{', '.join(run.arms)} · {' → '.join(run.stages)} · {where} · {about['written'][:10]}"


def _json(run: RunFolder, about: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    def nested(items: Any) -> dict[str, dict[str, Any]]:
        tree: dict[str, dict[str, Any]] = {}
        for (first, second), value in items:
            tree.setdefault(first, {})[second] = value
        return tree

    losses = [
        (
            key,
            {"first": curves[LOSS].start(1), "final": curves[LOSS].end(), "validation": _last(curves.get(VALIDATION))},
        )
        for key, curves in run.curves.items()
        if LOSS in curves
    ]
    rewards = {arm: run.reward(arm) for arm in run.arms}
    return {
        "about": about,
        "arms": list(run.arms),
        "stages": list(run.stages),
        "baseline": run.baseline,
        "missing": list(run.missing),
        "notes": list(notes),
        "losses": nested(losses),
        "loss_gaps": nested((key, {"final": g.final, "validation": g.validation}) for key, g in run.gaps.items()),
        "rewards": {arm: None if r is None else {"first": r[0], "last": r[1]} for arm, r in rewards.items()},
        "scores": nested((key, [asdict(s) for s in r.scores]) for key, r in run.results.items()),
        "comparisons": nested((key, c.to_json()) for key, c in run.comparisons.items()),
    }

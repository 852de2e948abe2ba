"""The report of `convergence.py`: what each arm costs, with intervals over seeds, and what they cannot say."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from convergence_run import read_json, run_folder
from convergence_settings import Plan

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation import plots
from lightning_nvfp4.evaluation.curves import VALIDATION, Curve, gap, read_curves
from lightning_nvfp4.evaluation.numerics_plots import numerics_plot
from lightning_nvfp4.evaluation.page import Block, Bullets, Heading, Plot, Table, Text, to_html, to_markdown
from lightning_nvfp4.evaluation.report_data import LOSS, RunFolder
from lightning_nvfp4.evaluation.statistics import t_interval

_STAGE = "pretrain"


@dataclass(frozen=True)
class Run:
    """One run: its result and its curves; a run that has not ended has no result."""

    result: dict[str, Any] | None
    curves: dict[str, Curve]

    @property
    def finished(self) -> bool:
        """Whether it has a final loss."""
        return self.result is not None and self.result["status"] == "finished"


Runs = dict[str, dict[int, Run]]


@dataclass(frozen=True)
class Gaps:
    """Relative gaps of an arm to the baseline of the same seed, one for each seed that both have finished."""

    seeds: tuple[int, ...]
    validation: tuple[float, ...]
    validation_bf16: tuple[float, ...]
    training: tuple[float, ...]


def collect(out: Path, plan: Plan) -> Runs:
    """Return the runs of every arm of the plan that are in `out`, by arm and seed.

    Raises:
        UserError: runs of one seed that did not start from the same weights and data.
    """
    runs: Runs = {}
    starts: dict[int, tuple[Path, dict[str, Any]]] = {}
    for arm in plan.arms:
        parent = run_folder(out, plan, arm, 0).parent
        for folder in sorted(parent.glob("seed-*")):
            seed = int(folder.name.removeprefix("seed-"))
            log, start = folder / "metrics.csv", read_json(folder / "start.json")
            if start is not None:
                first, other = starts.setdefault(seed, (folder, start))
                if any(start[what] != other[what] for what in ("weights", "batches")):
                    raise UserError(f"{folder} and {first} began with other weights or data: they are no pair.")
            result = read_json(folder / "result.json")
            if result is not None or log.is_file():
                runs.setdefault(arm.name, {})[seed] = Run(result, read_curves(log) if log.is_file() else {})
    return runs


def paired(runs: Runs, arm: str, baseline: str) -> Gaps:
    """Return the gaps of an arm, paired by seed."""
    ours, theirs = runs.get(arm, {}), runs.get(baseline, {})
    seeds = tuple(s for s in sorted(ours) if ours[s].finished and s in theirs and theirs[s].finished)
    rows = []
    for seed in seeds:
        mine, base = ours[seed], theirs[seed]
        assert mine.result is not None and base.result is not None
        final, bf16, other = (mine.result["val_loss"], mine.result["val_loss_bf16"], base.result["val_loss"])
        rows.append((final / other - 1, bf16 / other - 1, gap(mine.curves, base.curves, LOSS).final))
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return Gaps(seeds, *columns)


def extra_tokens(run: Run, base: Run, plan: Plan) -> float | None:
    """Return how many more tokens, as a share, the run takes to a loss of the baseline's, at the constant rate.

    Both curves are of held-out loss, and of one phase of the schedule: the second half of that between warm-up and
    decay. There the baseline's loss is taken as a straight line over log(tokens). The run's distance from the
    baseline's point at the same step, over the slope of that line, is the log of the ratio of tokens; the mean over the
    points is taken. So a run compared with itself gives 0, and no point of another phase is used.
    """
    ours, theirs = run.curves.get(VALIDATION), base.curves.get(VALIDATION)
    if ours is None or theirs is None:
        return None
    warm, end = plan.size.schedule().warmup_steps, plan.size.decay_start
    mine, other = (_phase(curve, warm + (end - warm) / 2, end) for curve in (ours, theirs))
    if len(mine.steps) < 2 or len(other.steps) < 2:
        return None
    slope = np.polyfit(np.log(other.steps + 1.0), other.values, 1)[0]
    if slope >= 0:
        return None
    _, left, right = np.intersect1d(mine.steps, other.steps, return_indices=True)
    return math.exp(float(np.mean(mine.values[left] - other.values[right])) / -slope) - 1


def _phase(curve: Curve, start: float, end: float) -> Curve:
    inside = (curve.steps + 1 > start) & (curve.steps + 1 <= end)
    return Curve(curve.steps[inside], curve.values[inside])


def extra_tokens_at_the_end(gap_: float, loss: float, shorter: Mapping[str, Any], longer: Mapping[str, Any]) -> float:
    """Return the same at the end of the schedule, from complete baseline runs of two budgets.

    Args:
        gap_: relative gap of the final loss.
        loss: the baseline's final loss at the longer budget.
        shorter: result of the baseline at the smaller budget.
        longer: at the larger; loss is taken as a line over log(tokens) between the two ends.
    """
    slope = (longer["val_loss"] - shorter["val_loss"]) / math.log(longer["tokens"] / shorter["tokens"])
    return math.exp(-gap_ * loss / slope) - 1


def percent(value: float, digits: int = 2) -> str:
    """Return a share in percent, with its sign."""
    return "" if math.isnan(value) else f"{100 * value:+.{digits}f} %"


def interval(values: Sequence[float]) -> str:
    """Return the mean with its 95 % t interval."""
    if not values:
        return "missing"
    low, high = t_interval(values)
    mean = percent(statistics.fmean(values))
    return mean if math.isnan(low) else f"{mean} [{percent(low)}, {percent(high)}]"


def write_report(out: Path, plan: Plan) -> Path:
    """Write report.html, report.md and report.json beside the runs of the plan's budget; return the HTML file."""
    runs = collect(out, plan)
    folder = out / f"{plan.size.tokens}-tokens"
    if not runs:
        raise UserError(f"{folder}: no run of an arm of this plan. Run some, or give the --tokens of those that are.")
    gaps = {arm.name: paired(runs, arm.name, plan.baseline) for arm in plan.arms if arm.name in runs}
    size = plan.size
    title = "What low precision costs in pretraining"
    lead = (
        f"{size.recipe}, {size.tokens} tokens a run ({size.steps} steps of {size.tokens_per_step}), one epoch; "
        f"{', '.join(_about(runs, 'hardware'))}; {datetime.now(UTC):%Y-%m-%d}"
    )
    blocks: list[Block] = [Heading("Final loss"), Table(_table(runs, gaps, plan), _CAPTION)]
    if limits := _limits(gaps, plan):
        blocks += [Heading("Against the published gaps"), Table(limits, "Limits in percent of the baseline's loss.")]
    blocks += [Heading("What the intervals say"), Bullets(tuple(_remarks(runs, gaps, plan)))]
    blocks += [Heading("Tokens to the same loss"), *_tokens(out, runs, gaps, plan)]
    if svg := plots.loss_plot(_as_folder(runs, plan), [_STAGE]):
        blocks += [Heading("Training loss"), Plot(svg, "Mean over the seeds that an arm shares with the baseline.")]
    if svg := _numerics(out, plan):
        blocks += [Heading("Numerics by layer"), svg]
    blocks += [Heading("How it was run"), *_how(out, runs, plan)]
    for path, text in (
        (folder / "report.html", to_html(title, lead, blocks)),
        (folder / "report.md", to_markdown(title, lead, blocks)),
        (folder / "report.json", json.dumps(_json(runs, gaps), indent=2) + "\n"),
    ):
        path.write_text(text, encoding="utf-8")
    return folder / "report.html"


_CAPTION = (
    "Held-out loss in nats per token at the end, in the arm's own forward; sd over seeds. Gaps: relative to the "
    "baseline of the same seed, mean over seeds with its 95 % t interval; BF16: the same weights in a BF16 forward; "
    "training: means of the last tenth of the steps."
)


def _table(runs: Runs, gaps: Mapping[str, Gaps], plan: Plan) -> list[list[str]]:
    rows = [["arm", "seeds", "loss", "sd", "gap", "gap in BF16", "training gap"]]
    for arm in plan.arms:
        if arm.name not in runs:
            continue
        losses = [r.result["val_loss"] for r in runs[arm.name].values() if r.finished and r.result]
        mean = f"{statistics.fmean(losses):.4f}" if losses else "missing"
        spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        mine = gaps[arm.name]
        cells = [interval(mine.validation), interval(mine.validation_bf16), interval(mine.training)]
        if arm.name == plan.baseline:
            cells = ["baseline", "", ""]
        rows.append([arm.name, str(len(losses)), mean, spread, *cells])
    return rows


def _limits(gaps: Mapping[str, Gaps], plan: Plan) -> list[list[str]]:
    rows = [["arm", "limit", "validation", "training"]]
    for arm in plan.arms:
        for kind, limit in arm.limits.items() if arm.name in gaps else ():
            mine = gaps[arm.name]
            cells = [_verdict(values, kind, limit) for values in (mine.validation, mine.training)]
            words = {"upper": "upper end of the interval", "point": "point estimate"}[kind]
            rows.append([arm.name, f"{words} at most {limit} %", *cells])
    return rows if len(rows) > 1 else []


def _verdict(values: Sequence[float], kind: str, limit: float) -> str:
    low, high = t_interval(values) if kind == "upper" else [statistics.fmean(values) if values else math.nan] * 2
    if math.isnan(high):
        return "missing: too few seeds"
    verdict = "better than the limit" if 100 * high <= limit else "not shown by so few seeds"
    if 100 * low > limit:
        verdict = "worse than the limit"
    return f"{verdict}: {100 * high:+.2f} %"


def _remarks(runs: Runs, gaps: Mapping[str, Gaps], plan: Plan) -> list[str]:
    lines = []
    base = [r.result["val_loss"] for r in runs.get(plan.baseline, {}).values() if r.finished and r.result]
    if len(base) > 1:
        spread = statistics.stdev(base) / statistics.fmean(base)
        lines.append(f"Noise: the baseline's final loss varies by {100 * spread:.2f} % (sd of {len(base)} seeds).")
    for name, mine in gaps.items():
        low, high = t_interval(mine.validation)
        if name == plan.baseline or math.isnan(low):
            continue
        lines.append(
            f"{name}, {len(mine.seeds)} seeds: with 95 % confidence the gap is not above {percent(high)} and not below "
            f"{percent(low)}. What lies between, zero {'included' if low <= 0 <= high else 'not included'}, cannot be "
            f"told apart; an arm that differs from another by less than {100 * (high - low) / 2:.2f} % is not ranked."
        )
    lines += [
        f"{name}, seed {seed}: diverged at step {run.result['steps']}; it is in no mean."
        for name, of in runs.items()
        for seed, run in of.items()
        if run.result and run.result["status"] == "diverged"
    ]
    lines += [
        f"{name}, seed {seed}: not finished; it is in no table."
        for name, of in runs.items()
        for seed, run in of.items()
        if run.result is None
    ]
    lines.append(
        "The intervals are over seeds of one model, one corpus and one budget. They say nothing of larger models, "
        "longer training or other data, and are not corrected for the number of arms. They take gaps as normal, which "
        "few seeds cannot show."
    )
    return lines


def _tokens(out: Path, runs: Runs, gaps: Mapping[str, Gaps], plan: Plan) -> list[Block]:
    rows = [["arm", "at the constant rate", "at the end of the schedule"]]
    short = _shorter(out, plan)
    base = runs.get(plan.baseline, {})
    for name, mine in gaps.items():
        if name == plan.baseline:
            continue
        shares = [extra_tokens(runs[name][s], base[s], plan) for s in mine.seeds]
        ends = []
        for seed, relative in zip(mine.seeds, mine.validation, strict=True):
            longer = base[seed].result
            if seed in short and longer and short[seed]["val_loss"] > longer["val_loss"]:
                ends.append(extra_tokens_at_the_end(relative, longer["val_loss"], short[seed], longer))
        rows.append([name, interval([s for s in shares if s is not None]), interval(ends)])
    other = f"the other: {_budget(short)} tokens" if short else "there is but one, see --noise"
    text = (
        "How many more tokens than the baseline an arm takes to the same held-out loss, by seed. At the constant rate: "
        "the distance of its points in the second half of that phase from the baseline's, over the slope of the "
        "baseline's loss over log(tokens) there. At the end: the final gap over the slope between complete baseline "
        f"runs of two budgets ({other})."
    )
    return [Text(text), Table(rows)]


def _shorter(out: Path, plan: Plan) -> dict[int, dict[str, Any]]:
    """Return results of complete baseline runs of the largest smaller budget, by seed."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    baseline = plan.arm(plan.baseline).folder
    for path in out.glob(f"*-tokens/{baseline}/seed-*/result.json"):
        budget = int(path.parents[2].name.removesuffix("-tokens"))
        result = read_json(path)
        if budget < plan.size.tokens and result and result["status"] == "finished":
            found.setdefault(budget, {})[result["seed"]] = result
    return found[max(found)] if found else {}


def _budget(short: Mapping[int, Mapping[str, Any]]) -> int:
    return next(iter(short.values()))["tokens"]


def _as_folder(runs: Runs, plan: Plan) -> RunFolder:
    """Return the mean curves as the folder of a pipeline, which the plots know."""
    base = runs.get(plan.baseline, {})
    curves: dict[tuple[str, str], dict[str, Curve]] = {}
    gaps = {}
    for name, of in runs.items():
        seeds = [seed for seed in of if of[seed].finished and seed in base and base[seed].finished]
        if not seeds:
            continue
        curves[name, _STAGE] = {LOSS: _mean([of[seed].curves[LOSS] for seed in seeds])}
        if name != plan.baseline:
            paired_base = {LOSS: _mean([base[seed].curves[LOSS] for seed in seeds])}
            gaps[name, _STAGE] = gap(curves[name, _STAGE], paired_base, LOSS)
    names = tuple(name for name, _ in curves if name != plan.baseline)
    return RunFolder((*names, plan.baseline), (_STAGE,), plan.baseline, (), curves, {}, gaps)


def _mean(curves: Sequence[Curve]) -> Curve:
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    return Curve(steps, np.mean([c.values[np.isin(c.steps, steps)] for c in curves], axis=0))


def _numerics(out: Path, plan: Plan) -> Plot | None:
    arms = [plan.hybrid, *(arm.name for arm in plan.arms if arm.name != plan.hybrid)]
    for name in arms:
        for path in sorted(run_folder(out, plan, plan.arm(name), 0).parent.glob("seed-*/numerics/metrics.csv")):
            if svg := numerics_plot(read_curves(path)):
                return Plot(svg, f"{name}, {path.parents[1].name}, the last observation.")
    return None


def _how(out: Path, runs: Runs, plan: Plan) -> list[Block]:
    size = plan.size
    rows = [["", ""]]
    command = f"python benchmarks/convergence.py run --tokens-dir TOKENS --out {out} --tokens {size.tokens}"
    rows.append(["command", command])
    rows += [[name, "; ".join(_about(runs, name)) or "not recorded"] for name in ("hardware", "versions", "parameters")]
    rows.append(["dates", " to ".join(sorted({d[:10] for d in _about(runs, "date")}))])
    rows.append(["optimizer", f"AdamW {dict(size.optimizer)}, gradients clipped at 1"])
    rows.append(["schedule", str(size.schedule())])
    rows.append(["held-out text", f"{size.val_batches * size.tokens_per_step} tokens, the same in every run"])
    rows += [[name, _summary(runs[name])] for name in runs]
    seconds = [r.result["seconds"] for of in runs.values() for r in of.values() if r.finished and r.result]
    if seconds:
        rows.append(["seconds of a run", f"{min(seconds)} to {max(seconds)}, beside the others that ran at the time"])
    return [Table(rows)]


def _summary(of: Mapping[int, Run]) -> str:
    lines = {r.result["layers"] for r in of.values() if r.finished and r.result and r.result.get("layers")}
    return "; ".join(sorted(lines)) or "nothing finished"


def _about(runs: Runs, name: str) -> list[str]:
    values = [r.result[name] for of in runs.values() for r in of.values() if r.result and r.result.get(name)]
    return sorted({", ".join(f"{k} {v}" for k, v in x.items()) if isinstance(x, dict) else str(x) for x in values})


def _json(runs: Runs, gaps: Mapping[str, Gaps]) -> dict[str, Any]:
    return {
        name: {
            "results": {str(seed): run.result for seed, run in of.items()},
            "seeds": list(gaps[name].seeds),
            "gaps": {
                kind: {"values": values, "interval": list(t_interval(values)) if len(values) > 1 else None}
                for kind, values in (
                    ("validation", gaps[name].validation),
                    ("validation_bf16", gaps[name].validation_bf16),
                    ("training", gaps[name].training),
                )
            },
        }
        for name, of in runs.items()
    }

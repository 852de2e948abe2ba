"""Does RL learn as well in 4 bits? One SFT checkpoint, arms x seeds of GRPO on it, and the difference of final rewards.

    python benchmarks/rl_compare.py --out runs/rl-compare --workers 2
    python benchmarks/rl_compare.py --out runs/rl-gsm8k --gsm8k gsm8k/train.jsonl SmolLM2-135M-Instruct

Without `--gsm8k`: the embedded word problems (exact answers; no code is run), starting from `--start`, or from the
shipped recipes pretrain, decay and sft, run here once in the first arm's precision. A seed sets the order of the
prompts and the sampling, and all arms of a seed meet the same prompts in the same order. Runs are `nvfp4 fit` with the
shipped recipes, `--workers` of them at a time. Started again, the driver continues every run at its last checkpoint;
`--minutes` stops it before a limit. A run that was begun with other settings, weights or problems is refused
(settings.json in its folder). It then writes, from what there is: curves.csv, curves.png and report.md.

Final reward: mean of the last `--final` steps; start: step 0, sampled before any update. The interval is Student's for
the differences paired by seed; Welch's, which ignores the pairing, stands beside it.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import fmean, variance

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from scipy import stats
from timing import hardware

from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.evaluation.statistics import t_interval
from lightning_nvfp4.lm.data.tasks import draw_word

METRICS = ("reward", "logp_diff", "routing_agreement", "kl", "entropy", "clip_share", "length", "zero_variance_share")
_PROMPTS = 4_000


@dataclass(frozen=True)
class Run:
    """One arm and seed; `folder` is its run folder."""

    arm: str
    seed: int
    folder: Path

    @property
    def done(self) -> bool:
        """Whether the fit has come to its end."""
        return (self.folder / "hf" / "config.json").is_file()

    def rows(self) -> list[dict[str, float | str]]:
        """The logged steps: `metrics.csv` and `timings.csv` joined by step."""
        table: dict[int, dict[str, float | str]] = {}
        for name in ("metrics.csv", "timings.csv"):
            path = self.folder / name
            if not path.is_file():
                continue
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    values = {key: float(value) for key, value in row.items() if value}
                    table.setdefault(int(values["step"]), {}).update(values)
        rows = []
        for step, values in sorted(table.items()):
            if "rl/reward" in values:
                chosen = {name: values[f"rl/{name}"] for name in METRICS if f"rl/{name}" in values}
                times = {name: values[f"time/{name}"] for name in ("step", "rollout_share") if f"time/{name}" in values}
                rows.append(
                    {"arm": self.arm, "seed": self.seed, "step": step}
                    | chosen
                    | {f"time_{k}": v for k, v in times.items()}
                )
        return rows


def main() -> int:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * arguments.minutes
    runs = [
        Run(arm, seed, arguments.out / Path(arm).stem / f"seed-{seed}")
        for seed in arguments.seeds
        for arm in arguments.arms
    ]
    missing = [run for run in runs if not run.done]
    if not arguments.report_only and (arguments.gsm8k or not missing or prepare_start(arguments, until)):
        settings = gsm8k_settings(arguments) if arguments.gsm8k else word_settings(arguments)
        begun_alike(runs, settings, arguments)
        work(missing, settings, arguments, until)
    return report(runs, arguments)


def begun_alike(runs: list[Run], settings: tuple[list[str], list[str]], arguments: argparse.Namespace) -> None:
    """Write down what decides a run's numbers, or compare it with what was written when the run began."""
    configs, options = settings
    common = {
        "recipes": [read_mapping(find_config(name)) for name in configs],
        "inputs": {key: content(Path(value)) for key, _, value in (option.partition("=") for option in options)},
        "overrides": sorted(arguments.overrides),
    }
    for run in runs:
        mine = json.loads(json.dumps({"arm": run.arm, "seed": run.seed, **common}))
        file = run.folder / "settings.json"
        if not file.is_file():
            run.folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(mine, indent=1), encoding="utf-8")
            temporary.rename(file)
        other = json.loads(file.read_text(encoding="utf-8"))
        if changed := [key for key in mine if other.get(key) != mine[key]]:
            raise SystemExit(
                f"{run.folder} holds a run of other {' and '.join(changed)} (compare settings.json): give another "
                "--out, or delete it."
            )


def content(path: Path) -> str:
    """Return a hash of a file, or of the weights in a folder; what is neither is its own name."""
    files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        return str(path)
    digest = hashlib.blake2b(digest_size=16)
    for name in files:
        with name.open("rb") as file:
            digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
    return digest.hexdigest()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and the report")
    parser.add_argument(
        "--arms", type=lambda t: t.split(","), default=["bf16-gemm", "nvfp4-hybrid"], help="the first is the baseline"
    )
    parser.add_argument("--seeds", type=seeds, default=None, help="such as 0-4 (default) or 0,3; with --gsm8k 0")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a run")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop, resumable, before so many minutes are over"
    )
    parser.add_argument("--start", type=Path, help="SFT checkpoint (run folder or Hugging Face folder)")
    parser.add_argument(
        "--gsm8k", nargs=2, metavar=("JSONL", "MODEL"), help="real problems, and the model to start from"
    )
    parser.add_argument("--final", type=int, default=5, help="steps at the end whose mean is the final reward")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of the RL recipe, such as trainer.max_steps=20"
    )
    arguments = parser.parse_args()
    if arguments.seeds is None:
        arguments.seeds = [0] if arguments.gsm8k else [0, 1, 2, 3, 4]
    return arguments


def seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if last else [int(word) for word in text.split(",")]


def prepare_start(arguments: argparse.Namespace, until: float) -> bool:
    """Make the SFT checkpoint by the shipped recipes where none is given; return whether the time sufficed."""
    if arguments.start:
        return True
    before: Path | None = None
    for stage in ("pretrain", "decay", "sft"):
        folder = arguments.out / "start" / stage
        if not (folder / "hf" / "config.json").is_file():
            options = [f"trainer.precision={arguments.arms[0]}"]
            if stage == "decay" and before:
                options.append(f"ckpt_path={before / 'checkpoints' / 'last.ckpt'}")
            if stage == "sft" and before:
                options.append(f"model.init_args.pretrained={before}")
            if not wait([start(folder, [f"recipes/{stage}.yaml"], options, arguments.threads)], until):
                return False
        before = folder
    return True


def word_settings(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Configurations and overrides of RL on the embedded word problems."""
    first = arguments.start or arguments.out / "start" / "sft"
    prompts = arguments.out / "prompts.jsonl"
    if not prompts.is_file():
        rng = Random("word problems")
        tasks = [draw_word(rng, "train") for _ in range(_PROMPTS)]
        rows = [{"prompt": task.question, "reference": {"kind": "exact", "answer": task.target}} for task in tasks]
        temporary = prompts.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.rename(prompts)
    return ["recipes/rl.yaml"], [f"model.init_args.pretrained={first}", f"data.init_args.path={prompts}"]


def gsm8k_settings(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Configurations and overrides of RL on GSM8K."""
    data, model = arguments.gsm8k
    return ["recipes/rl.yaml", "recipes/rl-gsm8k.yaml"], [
        f"model.init_args.pretrained={model}",
        f"data.init_args.path={data}",
    ]


def work(runs: list[Run], settings: tuple[list[str], list[str]], arguments: argparse.Namespace, until: float) -> None:
    """Run them, `workers` at a time, until all are done or the time is up."""
    configs, options = settings
    waiting, running = list(runs), []
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < arguments.workers:
            run = waiting.pop(0)
            own = [f"trainer.precision={run.arm}", *(f"{key}={run.seed}" for key in _SEEDS), *options]
            running.append(start(run.folder, configs, [*own, *arguments.overrides], arguments.threads))
        time.sleep(0.5)
        for process in [process for process in running if process.poll() is not None]:
            running.remove(process)
            if process.returncode:
                stop(running)
                raise SystemExit(f"{process.args[-1]}: the run failed: see log.txt in its folder")  # type: ignore[index]
    stop(running)


_SEEDS = ("seed_everything", "model.init_args.seed", "data.init_args.seed")


def start(folder: Path, configs: list[str], options: list[str], threads: int) -> subprocess.Popen[bytes]:
    """Start a fit in `folder`, or go on at its last checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [word for config in configs for word in ("--config", config)]
    if (folder / "checkpoints" / "last.ckpt").is_file():
        options = [option for option in options if not option.startswith("ckpt_path=")] + ["ckpt_path=last"]
    words += [f"--{option}" for option in [*options, "trainer.enable_progress_bar=false"]]
    command = [sys.executable, "-m", "lightning_nvfp4.cli", "fit", *words, f"--trainer.default_root_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def wait(processes: list[subprocess.Popen[bytes]], until: float) -> bool:
    """Whether all end well before the time is up."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            if any(codes):
                raise SystemExit(f"a run failed: {processes[0].args!r}")
            return True
        time.sleep(0.5)
    stop(processes)
    return False


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them; their last checkpoints are whole."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def report(runs: list[Run], arguments: argparse.Namespace) -> int:
    """Write curves and comparison from whatever has been logged."""
    rows = [row for run in runs for row in run.rows()]
    if not rows:
        print("no step has been logged yet")
        return 1
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (arguments.out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
    plot(runs, arguments)
    subject = "GSM8K" if arguments.gsm8k else "embedded word problems"
    device = hardware("cuda" if torch.cuda.is_available() else "cpu")
    columns = "arm, seed, steps, start, final, gain, logp_diff: mean (max), routing agreement, rollout share, s a step"
    lines = [
        f"# RL on {subject}: {' against '.join(reversed(arguments.arms))}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {device}, torch {torch.__version__}. Final reward: mean of the last "
        f"{arguments.final} steps; start: step 0. Seeds {', '.join(map(str, arguments.seeds))}. "
        f"Command: `benchmarks/rl_compare.py {' '.join(sys.argv[1:])}`",
        "",
        f"| {columns.replace(', ', ' | ')} |",
        "|---" * len(columns.split(", ")) + "|",
    ]
    finals: dict[str, dict[int, tuple[float, float]]] = {arm: {} for arm in arguments.arms}
    for run in runs:
        mine = run.rows()
        if not mine:
            continue
        rewards = [float(row["reward"]) for row in mine]
        begin, end = rewards[0], fmean(rewards[-arguments.final :])
        if run.done:
            finals[run.arm][run.seed] = begin, end
        gaps = [float(row["logp_diff"]) for row in mine]
        lines.append(
            f"| {Path(run.arm).stem} | {run.seed} | {len(mine)}{'' if run.done else ', unfinished'} | {begin:.3f} "
            f"| {end:.3f} | {end - begin:+.3f} | {fmean(gaps):.4f} ({max(gaps):.4f}) "
            f"| {mean_of(mine, 'routing_agreement')} "
            f"| {mean_of(mine, 'time_rollout_share')} | {mean_of(mine, 'time_step')} |"
        )
    for arm in arguments.arms[1:]:
        lines += ["", *compare(arguments.arms[0], arm, finals)]
    (arguments.out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0 if all(run.done for run in runs) else 1


def mean_of(rows: list[dict[str, float | str]], name: str) -> str:
    values = [float(row[name]) for row in rows if name in row]
    return f"{fmean(values):.3f}" if values else "-"


def compare(baseline: str, arm: str, finals: dict[str, dict[int, tuple[float, float]]]) -> list[str]:
    """Sentences on the difference in final reward, over the seeds that both arms have finished."""
    both = sorted(finals[baseline].keys() & finals[arm].keys())
    title = f"**{Path(arm).stem} - {Path(baseline).stem}**, {len(both)} seeds finished in both"
    if len(both) < 2:
        return [f"{title}: no interval yet."]
    one, other = ([finals[name][seed][1] for seed in both] for name in (arm, baseline))
    difference = [a - b for a, b in zip(one, other, strict=True)]
    low, high = t_interval(difference)
    welch_low, welch_high = welch_interval(one, other)
    gains = {name: fmean(finals[name][seed][1] - finals[name][seed][0] for seed in both) for name in (arm, baseline)}
    return [
        f"{title}: {fmean(difference):+.4f}, 95 % interval paired by seed (Student) [{low:+.4f}, {high:+.4f}], "
        f"Welch [{welch_low:+.4f}, {welch_high:+.4f}]. "
        f"{'It contains 0' if low <= 0 <= high else 'It does not contain 0'}; its centre is "
        f"{'within' if abs(fmean(difference)) <= 0.05 else 'not within'} 0.05. Mean gain over the start: "
        + ", ".join(f"{Path(name).stem} {gain:+.3f}" for name, gain in gains.items())
        + f". The interval cannot exclude a difference of up to {max(abs(low), abs(high)):.3f}."
    ]


def welch_interval(one: list[float], other: list[float]) -> tuple[float, float]:
    """Welch's 95 % interval of the difference of two means."""
    a, b = variance(one) / len(one), variance(other) / len(other)
    centre = fmean(one) - fmean(other)
    if a + b == 0:
        return centre, centre
    freedom = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(a + b)
    return centre - half, centre + half


def plot(runs: list[Run], arguments: argparse.Namespace) -> None:
    """One picture: each arm's rewards by seed, thin, and their mean, bold."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for colour, arm in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], arguments.arms, strict=False):
        curves = [[float(row["reward"]) for row in run.rows()] for run in runs if run.arm == arm]
        curves = [curve for curve in curves if curve]
        for curve in curves:
            axes.plot(curve, color=colour, linewidth=0.6, alpha=0.5)
        if curves:
            means = [fmean(values) for values in zip(*curves, strict=False)]
            axes.plot(means, color=colour, linewidth=2, label=f"{Path(arm).stem}, {len(curves)} seeds")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.out / "curves.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())

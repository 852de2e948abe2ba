"""Throughput of evaluation: documents a second of each precision against bf16-gemm, in one run.

    python benchmarks/bench_eval.py MODEL --data-dir DATA [--config eval/smollm2.yaml] [--tasks mmlu gsm8k]

Each precision evaluates once unseen, which compiles kernels, and then `--repeats` times, in turns with the others.
Loading the model and the data counts, as it does for a user.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from timing import show

from lightning_nvfp4.evaluation.run import evaluate

CONTROL = "bf16-gemm"


def main() -> None:
    """Print the table and write the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--config", default="eval/smollm2.yaml")
    parser.add_argument("--tasks", nargs="+", default=["mmlu", "gsm8k"])
    parser.add_argument("--precisions", nargs="+", default=["fp8", "mxfp8", "nvfp4-hybrid"])
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--csv", default="bench_eval.csv")
    options = parser.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks:
            config = one_task(Path(options.config), task, Path(folder))
            seconds: dict[str, list[float]] = {name: [] for name in (CONTROL, *options.precisions)}
            documents = 0
            for number in range(options.repeats + 1):
                for name, times in seconds.items():
                    torch.manual_seed(0)
                    start = time.perf_counter()
                    result = evaluate(
                        options.model,
                        config,
                        name,
                        Path(folder) / f"{task}-{name}.json",
                        limit=options.limit,
                        data_dir=options.data_dir,
                        progress=False,
                    )
                    documents = result.score(task).n
                    if number:
                        times.append(time.perf_counter() - start)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            for name, median in medians.items():
                rate, ratio = f"{documents / median:.2f}", f"{medians[CONTROL] / median:.2f}"
                rows.append([task, name, str(documents), f"{median:.1f}", rate, ratio])
    head = ["task", "precision", "documents", "seconds", "documents/s", f"x {CONTROL}"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    show(f"Evaluation of {Path(options.model).name}, seed 0", head, rows, device, options.csv)


def one_task(config: Path, task: str, folder: Path) -> Path:
    """Write the suite `config` with this task alone and return the file."""
    suite: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
    spec = suite["tasks"][task]
    if "definition" in spec:
        spec["definition"] = str((config.parent / spec["definition"]).resolve())
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump({**suite, "tasks": {task: spec}}), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()

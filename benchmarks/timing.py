"""Shared by the benchmarks: medians on any device, a table on the terminal, the same rows as CSV."""

from __future__ import annotations

import csv
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def milliseconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median wall time of `work` in ms, after two warm-up calls; CUDA is waited for."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for i in range(repeats + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if i >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def hardware(device: str) -> str:
    """Return what the numbers were taken on, in words."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [line for line in _cpuinfo() if line.startswith("model name")]
    name = names[0].split(":", 1)[1].strip() if names else platform.processor()
    return f"{name}, {torch.get_num_threads()} thread(s)"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], device: str, csv_path: str) -> None:
    """Print the table and write it to `csv_path`."""
    table = Table(title=f"{title}\n{hardware(device)}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}")
    for name in head:
        table.add_column(name, justify="left" if name == head[0] else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    with open(csv_path, "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])

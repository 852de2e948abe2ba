"""Time what `NumericsMonitor` adds to training: steps it observes against the others, within one run.

    python benchmarks/bench_monitor.py [--device cpu] [--preset nvfp4-hybrid] [--csv bench_monitor.csv]
    python benchmarks/bench_monitor.py --device cuda --model recipes/model/moe-200m.yaml --batch 16 --length 1024

Observed and other steps take turns, so that a change of load meets both. The cost at N = 100 is
(observed / other - 1) / 100.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning
import torch
from bench_step import SMALL
from omegaconf import OmegaConf
from timing import show
from torch.utils.data import DataLoader

from lightning_nvfp4 import NumericsMonitor
from lightning_nvfp4.lm.model import CausalLM


class Clock(lightning.pytorch.Callback):
    """Seconds of every step, the monitor's part included: it comes last among the callbacks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time between two starts."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="nvfp4-hybrid")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default=None, help="a recipe with model.init_args.model; the demo's without")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--csv", default="bench_monitor.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config: Any = SMALL
    if options.model:
        config = OmegaConf.to_container(OmegaConf.load(options.model).model.init_args.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config["vocab_size"], (options.steps, options.batch, options.length), generator=generator)
    batches: Any = DataLoader([{"input_ids": t, "labels": t} for t in tokens], batch_size=None)
    clock = Clock()
    trainer = lightning.Trainer(
        accelerator=options.device,
        devices=1,
        precision=options.preset,
        max_steps=options.steps,
        callbacks=[clock, NumericsMonitor(every_n_steps=2)],
        logger=lightning.pytorch.loggers.CSVLogger("."),
        log_every_n_steps=10**9,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(CausalLM(model=config), batches)
    times = [b - a for a, b in zip(clock.seconds, clock.seconds[1:], strict=False)][4:]
    observed, other = statistics.median(times[0::2]), statistics.median(times[1::2])
    cost = f"{observed / other - 1:.2f} %"  # over 100 steps, in percent of them
    row = [options.preset, f"{1e3 * other:.1f}", f"{1e3 * observed:.1f}", f"{observed / other:.2f}", cost]
    head = ["preset", "step ms", "observed step ms", "ratio", "cost at N = 100"]
    show("A training step with and without NumericsMonitor", head, [row], options.device, options.csv)


if __name__ == "__main__":
    main()

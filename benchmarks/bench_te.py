"""`fp8` through Transformer Engine against `bf16-gemm`, the same modules with nothing quantized.

    python benchmarks/bench_te.py time    [--model dense-1b|moe-200m|FILE] [--precision fp8] [--csv bench_te_time.csv]
    python benchmarks/bench_te.py loss    [--model ...] [--steps 200] [--seeds 1]   losses of both arms from one start
    python benchmarks/bench_te.py ddp     two GPUs, DDP: losses against one GPU
    python benchmarks/bench_te.py fsdp2   two GPUs, FSDP2: losses against one GPU, weights sharded
    python benchmarks/bench_te.py resume  save on the GPU, go on in nvfp4-hybrid on a CPU, and back

Also with a precision that Transformer Engine runs on a newer GPU. A run that falls back to emulation is an error.
`time` takes the arms in turns within one run, so that a change of load meets all of them; `stock` is the model as
transformers made it, under BF16 autocast.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from bench_step import build, step
from lightning.pytorch.strategies import ModelParallelStrategy
from omegaconf import OmegaConf
from timing import show
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_nvfp4  # noqa: F401  (registers the precision names)
from lightning_nvfp4 import capability, load_recipe
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.stdlib_text import stdlib_documents
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig, ScheduleConfig

ROOT = Path(__file__).resolve().parent.parent
CONTROL = "bf16-gemm"
DENSE_1B = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""1.04 B parameters."""
SMALL_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
BATCHES = {"time": (8, 2048), "loss": (8, 512), "ddp": (8, 512), "fsdp2": (8, 512), "resume": (4, 128)}
"""Sequences and tokens of a batch, on one GPU."""


def fields(name: str) -> dict[str, Any]:
    """Return the configuration of a model by name, or from a recipe."""
    if name in ("dense-1b", "small-moe"):
        return DENSE_1B if name == "dense-1b" else SMALL_MOE
    path = ROOT / "recipes/model/moe-200m.yaml" if name == "moe-200m" else Path(name)
    found: Any = OmegaConf.to_container(OmegaConf.load(path).model.init_args.model)
    return found


def require_te(precision: str) -> None:
    """Stop unless Transformer Engine is what runs a precision here."""
    choice = capability.choose("auto", load_recipe(precision))
    if choice.backend != "te":
        raise UserError(f"precision {precision!r} would not run in Transformer Engine: {choice.reason}.")
    print(f"{precision}: {choice.reason}", flush=True)


def stock(config: dict[str, Any], device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model of `build` without conversion."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)


def time_steps(options: argparse.Namespace) -> None:
    """Print the median time of a training step of each arm."""
    config = fields(options.model)
    batch, length = options.batch or BATCHES["time"][0], options.length or BATCHES["time"][1]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config["vocab_size"], (batch, length), generator=generator).to("cuda")
    arms = {name: build(config, name, "cuda") for name in (options.precision, CONTROL)}
    arms["stock"] = stock(config, "cuda")
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(options.repeats + 3):
        for name, (model, optimizer) in arms.items():
            seconds = step(model, optimizer, tokens)
            if i >= 3:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    count = sum(p.numel() for p in arms["stock"][0].parameters())
    rows = [
        [
            name,
            f"{1e3 * t:.1f}",
            f"{t / medians[CONTROL]:.3f}",
            f"{t / medians['stock']:.3f}",
            f"{tokens.numel() / t:,.0f}",
        ]
        for name, t in medians.items()
    ]
    title = (
        f"One training step, {config['model_type']} of {count / 1e6:.1f} M parameters, {batch} x {length} tokens, eager"
    )
    head = ["arm", "median ms", f"x {CONTROL}", "x stock", "tokens/s"]
    show(title, head, rows, "cuda", options.csv or "bench_te_time.csv")


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of bytes of the standard library's source; window i is a pure function of i."""

    def __init__(self, length: int) -> None:
        text = "\n".join(stdlib_documents()).encode()
        self.tokens = torch.tensor(list(text), dtype=torch.int64)
        self.length = length

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = (index * 7919 * self.length) % (len(self.tokens) - self.length)
        window = self.tokens[start : start + self.length]
        return {"input_ids": window, "labels": window}


class Losses(lightning.Callback):
    """Collects the losses, and what the precision plugin said of its backend."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.backend = ""
        self.seconds = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Note the backend and the time."""
        plugin: Any = trainer.precision_plugin
        self.backend = plugin.report.backend
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss, averaged over the ranks."""
        self.values.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))
        self.seconds = time.perf_counter() - self.start


def fit(
    precision: str,
    config: dict[str, Any],
    steps: int,
    batch: int,
    length: int,
    ckpt_path: str | None = None,
    *,
    seed: int = 0,
    decay: int = 0,
    **arguments: Any,
) -> tuple[lightning.Trainer, CausalLM, Losses]:
    """Train and return what was seen; over the last `decay` steps the rate falls to nothing."""
    lightning.seed_everything(seed, verbose=False)
    schedule = ScheduleConfig(kind="constant", warmup_steps=20)
    if decay:
        schedule = ScheduleConfig(kind="wsd", warmup_steps=20, decay_start=steps - decay, decay_steps=decay)
    module = CausalLM(model=config, seed=seed, optimizer=OptimizerConfig(lr=3e-4), schedule=schedule)
    losses = Losses()
    settings: dict[str, Any] = {
        "accelerator": "cuda",
        "devices": 1,
        "precision": precision,
        "max_steps": steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [losses],
        **arguments,
    }
    # Lightning's own distributed sampler shuffles: here the ranks share the batches of one process.
    trainer = lightning.Trainer(**settings, use_distributed_sampler=False)
    windows = Windows(length)
    share = range(int(os.environ.get("LOCAL_RANK", 0)), len(windows), settings["devices"])
    trainer.fit(module, DataLoader(windows, batch_size=batch, sampler=share, num_workers=0), ckpt_path=ckpt_path)
    if settings["accelerator"] == "cuda" and precision != CONTROL and losses.backend != "te":
        raise RuntimeError(f"{precision} ran in {losses.backend}.")
    return trainer, module, losses


def tail(values: list[float]) -> float:
    """Return the mean of the last tenth."""
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def compare_losses(options: argparse.Namespace) -> bool:
    """Train both arms from one start, once for each seed; the ends are to lie within half a percent on average.

    The rate decays over the second half: at a constant one, where a run stands after 200 steps is mostly chance.
    """
    config, (batch, length) = fields(options.model), BATCHES["loss"]
    batch, length = options.batch or batch, options.length or length
    rows, gaps = [], []
    for seed in range(options.seeds):
        ends = []
        for name in (options.precision, CONTROL):
            _, _, seen = fit(name, config, options.steps, batch, length, seed=seed, decay=options.steps // 2)
            torch.cuda.empty_cache()
            ends.append(tail(seen.values))
            pace = f"{seen.seconds / options.steps * 1e3:.0f}"
            rows.append([str(seed), name, seen.backend, f"{seen.values[0]:.4f}", f"{ends[-1]:.4f}", pace])
        gaps.append(ends[0] / ends[1] - 1)
    gap = statistics.fmean(gaps)
    spread = f" (seeds {min(gaps):+.3%} to {max(gaps):+.3%})" if len(gaps) > 1 else ""
    show(
        f"{options.steps} steps of {options.model}, {batch} x {length} bytes; gap at the end {gap:+.3%}{spread}",
        ["seed", "arm", "backend", "first loss", "last tenth", "ms a step"],
        rows,
        "cuda",
        options.csv or "bench_te_loss.csv",
    )
    return abs(gap) < 0.005


def two_gpus(options: argparse.Namespace) -> bool:
    """Train on two GPUs and, on the first of them, on one with the same batches."""
    config, (batch, length) = fields(options.model), BATCHES[options.part]
    strategy: Any = "ddp"
    if options.part == "fsdp2":
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    trainer, module, seen = fit(
        options.precision, config, options.steps, batch // 2, length, devices=2, strategy=strategy
    )
    sharded = sum(type(p).__name__ == "DTensor" or hasattr(p, "placements") for p in module.parameters())
    zero = sum(p.grad is None for p in module.parameters())
    if not trainer.is_global_zero:
        return True
    torch.distributed.destroy_process_group()
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    _, _, one = fit(options.precision, config, options.steps, batch, length)
    gap = max(abs(a / b - 1) for a, b in zip(seen.values, one.values, strict=True))
    rows = [
        [f"2 GPUs, {options.part}", seen.backend, f"{seen.values[0]:.4f}", f"{tail(seen.values):.4f}"],
        ["1 GPU", one.backend, f"{one.values[0]:.4f}", f"{tail(one.values):.4f}"],
    ]
    title = (
        f"{options.precision}, {options.steps} steps of {options.model}; largest difference of a loss {gap:.3%}; "
        f"{sharded} sharded parameters, {zero} without gradient"
    )
    show(
        title,
        ["arm", "backend", "first loss", "last tenth"],
        rows,
        "cuda",
        options.csv or f"bench_te_{options.part}.csv",
    )
    return gap < 0.02 and (options.part == "ddp" or sharded > 0)


def resume(options: argparse.Namespace) -> bool:
    """Go from the GPU to a CPU in nvfp4-hybrid and back by checkpoints."""
    batch, length = BATCHES["resume"]
    legs = [
        (options.precision, "cuda", 10),
        ("nvfp4-hybrid", "cpu", 14),
        (options.precision, "cuda", 20),
    ]
    rows, path = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, (precision, device, steps) in enumerate(legs):
            trainer, _, seen = fit(
                precision,
                SMALL_MOE,
                steps,
                batch,
                length,
                path,
                accelerator=device,
                default_root_dir=folder,
            )
            path = f"{folder}/{number}.ckpt"
            trainer.save_checkpoint(path)
            content = torch.load(path, weights_only=True)["state_dict"]
            extra = sum("_extra_state" in name for name in content)
            other = sum(t.dtype != torch.float32 for t in content.values() if t.is_floating_point())
            rows.append(
                [
                    f"{precision} on {device}",
                    seen.backend,
                    str(len(seen.values)),
                    f"{seen.values[0]:.4f}",
                    f"{seen.values[-1]:.4f}",
                    f"{extra} / {other}",
                ]
            )
    head = ["leg", "backend", "steps", "first loss", "last loss", "_extra_state / not FP32"]
    show("Save, resume elsewhere, and back: a small MoE", head, rows, "cuda", options.csv or "bench_te_resume.csv")
    return [row[2] for row in rows] == ["10", "4", "6"] and all(row[5] == "0 / 0" for row in rows)


def main() -> int:
    """Run one part; the exit status is 1 where its condition does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["time", "loss", "ddp", "fsdp2", "resume"])
    parser.add_argument("--model", default="dense-1b")
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--csv")
    options = parser.parse_args()
    require_te(options.precision)
    if options.part == "time":
        time_steps(options)
        return 0
    held = {"loss": compare_losses, "ddp": two_gpus, "fsdp2": two_gpus, "resume": resume}[options.part](options)
    print("PASS" if held else "FAIL", flush=True)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())

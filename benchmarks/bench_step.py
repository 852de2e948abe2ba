"""Time a whole training step of a small mixture of experts in every preset, as a multiple of the control arm's.

    python benchmarks/bench_step.py [--device cpu] [--presets bf16-gemm,mxfp8,nvfp4-hybrid] [--csv bench_step.csv]
    python benchmarks/bench_step.py --device cuda --model recipes/model/moe-200m.yaml --batch 16 --length 1024

The presets take turns within one run, so that a change of load meets all of them. Emulated numerics: the ratios
are the price of emulation on this machine, not the speed of native hardware.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from omegaconf import OmegaConf
from timing import show
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_nvfp4 import PRESETS, convert
from lightning_nvfp4.nn.autocast import bf16_autocast

SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 96,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
"""The demo's model."""


def build(config: dict[str, Any], preset: str, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of random weights, converted, and its optimizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    convert(model, preset)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Run forward, backward and update; return the seconds it took."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with bf16_autocast(tokens.device.type):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_gib(arm: tuple[torch.nn.Module, torch.optim.Optimizer], tokens: torch.Tensor) -> str:
    """Return the memory that a step takes on top of what is there before it, on CUDA."""
    step(*arm, tokens)
    if not tokens.is_cuda:
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(*arm, tokens)
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default=None, help="a recipe with model.init_args.model; the demo's without")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--csv", default="bench_step.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = list(dict.fromkeys([*options.presets.split(","), "bf16-gemm"]))
    config: Any = SMALL
    if options.model:
        config = OmegaConf.to_container(OmegaConf.load(options.model).model.init_args.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config["vocab_size"], (options.batch, options.length), generator=generator)
    tokens = tokens.to(options.device)
    arms = {name: build(config, name, options.device) for name in names}
    peaks = {name: peak_gib(arms[name], tokens) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(options.repeats + 2):
        for name, (model, optimizer) in arms.items():
            seconds = step(model, optimizer, tokens)
            if i >= 2:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["bf16-gemm"]
    rows = [[name, f"{1e3 * t:.1f}", f"{t / base:.2f}", peaks[name]] for name, t in medians.items()]
    count = sum(p.numel() for p in arms["bf16-gemm"][0].parameters())
    title = (
        f"One training step, {config['model_type']} of {count / 1e6:.1f} M parameters, {tokens.numel()} tokens, eager"
    )
    show(title, ["preset", "median ms", "x bf16-gemm", "peak GiB"], rows, options.device, options.csv)


if __name__ == "__main__":
    main()

"""Time a whole training step of a small mixture of experts in every preset, as a multiple of the control arm's.

    python benchmarks/bench_step.py [--device cpu] [--presets bf16-gemm,mxfp8,nvfp4-hybrid] [--csv bench_step.csv]

The presets take turns within one run, so that a change of load meets all of them. Emulated numerics: the ratios
are the price of emulation on this machine, not the speed of native hardware.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from timing import show
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lightning_nvfp4 import PRESETS, convert
from lightning_nvfp4.nn.autocast import bf16_autocast


def build(preset: str, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the demo's model, converted, and its optimizer."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=96,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--csv", default="bench_step.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = list(dict.fromkeys([*options.presets.split(","), "bf16-gemm"]))
    arms = {name: build(name, options.device) for name in names}
    tokens = torch.randint(0, 1024, (16, 128), generator=torch.Generator().manual_seed(0)).to(options.device)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(options.repeats + 2):
        for name, (model, optimizer) in arms.items():
            seconds = step(model, optimizer, tokens)
            if i >= 2:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [[name, f"{1e3 * t:.0f}", f"{t / medians['bf16-gemm']:.2f}"] for name, t in medians.items()]
    title = "One training step, 1.1 M parameter Qwen3-MoE, 2048 tokens, eager"
    show(title, ["preset", "median ms", "x bf16-gemm"], rows, options.device, options.csv)


if __name__ == "__main__":
    main()

"""The first hour on a Blackwell machine: does Transformer Engine compute what the emulation says, and how fast?

    python benchmarks/blackwell_day_one.py [--quick] [--presets fp8,mxfp8,nvfp4,nvfp4-hybrid] [--csv day_one.csv]

For every preset that runs natively: bytes of every deterministic plane against the reference; distribution of the
stochastic ones; outputs and gradients of layers against the emulation; step time against `bf16-gemm` and the model as
transformers made it; loss of 200 steps against `bf16-gemm`. Ends with a table; the exit status is 1 if a line fails.
On a GPU with fewer formats the presets that do not run there are listed with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
from bench_step import build, step
from bench_te import CONTROL, DENSE_1B, SMALL_MOE, fields, fit, stock, tail
from timing import show
from torch import Tensor

from lightning_nvfp4 import PRESETS, capability
from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.ops import quantize
from lightning_nvfp4.ops.te import known_answer, plan
from lightning_nvfp4.recipe import GemmRecipe
from lightning_nvfp4.testing import sqnr_db

_LEAST_DB = 45.0
"""Of results against the emulation: BF16 results alone give about 55, a tensor scale folded into an operand 50."""
_MOST_SIGMA = 5.0
_MOST_GAP = 0.005
_CASES = (((256,), 384, 256, True), ((128, 0, 256), 384, 256, True), ((1024,) * 8, 2048, 2048, False))

Row = tuple[str, str, str, str]
"""preset, check, result, what was seen"""


def gemms(preset: str) -> dict[str, GemmRecipe]:
    """Return the distinct numerics of a preset."""
    recipe = PRESETS[preset]
    named = {name: recipe.gemms[name] for name in ("experts", "linear")}
    return named if named["experts"] != named["linear"] else {"all": named["experts"]}


def bytes_are_equal(preset: str) -> str:
    """Compare every deterministic plane; an empty text is a pass."""
    return "; ".join(line for gemm in gemms(preset).values() for line in known_answer.differences(gemm, "cuda"))


def rounding_is_unbiased(preset: str) -> str:
    """Count how often values a quarter above a code go up, in every stochastic plane; "-" where there is none."""
    found = []
    for gemm in gemms(preset).values():
        quantizer = plan.planned(gemm)["grad_output"]
        for operand, part, dim in zip(
            plan.TENSORS["grad_output"], quantizer.parts or (quantizer, quantizer), (1, 0), strict=True
        ):
            spec = getattr(gemm, operand)
            if spec is None or spec.rounding != "stochastic" or spec.hadamard:
                continue
            low, high, top = (2.0, 3.0, 6.0) if spec.format == "nvfp4" else (32.0, 36.0, 448.0)
            x = torch.full((4096, 256), low + (high - low) / 4, device="cuda", dtype=torch.bfloat16)
            # Every block has the largest element, so that its scale is one; it is no part of the count.
            keep = torch.zeros_like(x, dtype=torch.bool)
            (keep[:, ::16] if dim else keep[::16])[:] = True
            x[keep] = top
            seen = known_answer.quantized(part, x, spec, dim)
            decoded = _decoded(seen, x, spec, dim)[~keep]
            up = (decoded > (low + high) / 2).double()
            z = (float(up.mean()) - 0.25) / (0.25 * 0.75 / up.numel()) ** 0.5
            if not 0 < float(up.mean()) < 1 or abs(z) > _MOST_SIGMA:
                found.append(f"{operand}: P(up) = {float(up.mean()):.5f} for 1/4, z = {z:.1f}")
    return "; ".join(found)


def _decoded(seen: known_answer.Bytes, x: Tensor, spec: plan.QuantSpec, dim: int) -> Tensor:
    """Decode TE's bytes by the reference."""
    from lightning_nvfp4.ops import QuantizedTensor

    like = quantize(x, spec, dim=dim)
    q = QuantizedTensor(
        seen.codes.contiguous(), seen.block_scale.contiguous(), like.tensor_scale, like.amax, spec, tuple(x.shape), dim
    )
    return q.dequantize()


def layers_equal_the_emulation(preset: str) -> str:
    """Run layers forward and backward both ways; where TE draws its own random bits the bound is that of noise."""
    found = []
    for name, gemm in gemms(preset).items():
        own = plan.builtin(gemm) and any(
            s is not None and s.rounding == "stochastic" for s in (gemm.dgrad_grad_output, gemm.wgrad_grad_output)
        )
        for counts, n, k, bias in _CASES:
            ours, theirs = (_layer(gemm, counts, n, k, bias, native) for native in (False, True))
            for what, a, b in zip(("y", "dx", "dw", "db"), ours, theirs, strict=False):
                least = 12.0 if own and what in ("dx", "dw") else _LEAST_DB
                got = sqnr_db(a, b)
                if not got > least:
                    found.append(f"{name} {what} of {counts} x {n} x {k}: {got:.1f} dB")
    return "; ".join(found)


def _layer(gemm: GemmRecipe, counts: tuple[int, ...], n: int, k: int, bias: bool, native: bool) -> list[Tensor]:
    numerics = LayerNumerics(gemm, NumericsContext(step_seed=3), 1, native=native)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), k, generator=g).to("cuda", torch.bfloat16).requires_grad_()
    w = torch.randn(len(counts), n, k, generator=g).to("cuda").requires_grad_()
    b = torch.randn(len(counts), n, generator=g).to("cuda").requires_grad_() if bias else None
    y = grouped_linear(x, w, b, counts, numerics, torch.bfloat16)
    y.backward(torch.randn(sum(counts), n, generator=g).to("cuda", torch.bfloat16))
    return [t.float() for t in (y.detach(), x.grad, w.grad, None if b is None else b.grad) if t is not None]


def step_times(presets: list[str], quick: bool) -> Iterator[Row]:
    """Time a dense model and a mixture of experts; a preset passes where it is faster than the control."""
    models = [("small MoE", SMALL_MOE, 4, 256)]
    if not quick:
        models = [("dense 1B", DENSE_1B, 8, 2048), ("moe-200m", fields("moe-200m"), 16, 1024)]
    for title, config, batch, length in models:
        tokens = torch.randint(0, config["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to("cuda")
        medians = {}
        for name in [CONTROL, "stock", *presets]:
            arm = stock(config, "cuda") if name == "stock" else build(config, name, "cuda")
            seconds = [step(*arm, tokens) for _ in range(3 if quick else 13)]
            medians[name] = statistics.median(seconds[2:])
            del arm
            torch.cuda.empty_cache()
        for name in presets:
            ratio, to_stock = medians[name] / medians[CONTROL], medians[name] / medians["stock"]
            seen = f"{1e3 * medians[name]:.1f} ms, {ratio:.3f} x {CONTROL}, {to_stock:.3f} x stock"
            yield name, f"step time, {title}", "pass" if ratio < 1 else "slower", seen


def losses(presets: list[str], quick: bool) -> Iterator[Row]:
    """Train every preset and the control from one start."""
    config, steps = (SMALL_MOE, 5) if quick else (fields("moe-200m"), 200)
    batch, length = (2, 64) if quick else (16, 512)
    control = tail(fit(CONTROL, config, steps, batch, length)[2].values)
    for name in presets:
        gap = tail(fit(name, config, steps, batch, length)[2].values) / control - 1
        yield name, f"loss after {steps} steps", "pass" if abs(gap) < _MOST_GAP else "FAIL", f"{gap:+.3%}"


def checked(preset: str, name: str, check: Callable[[str], str]) -> Row:
    """Run a check; what it raises is a failure too."""
    try:
        wrong = check(preset)
    except Exception as error:
        traceback.print_exc()
        wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return preset, name, "FAIL" if wrong else "pass", wrong


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="fp8,mxfp8,nvfp4,nvfp4-hybrid")
    parser.add_argument("--quick", action="store_true", help="small models, few steps: does it run?")
    parser.add_argument("--csv", default="day_one.csv")
    options = parser.parse_args()
    capability.require_te_environment()
    rows: list[Row] = []
    native = []
    for preset in options.presets.split(","):
        choice = capability.backend_for(preset)
        if choice.backend == "te":
            native.append(preset)
        else:
            rows.append((preset, "runs natively", "no", choice.reason))
    for preset in native:
        rows.append(checked(preset, "bytes of deterministic planes", bytes_are_equal))
        rows.append(checked(preset, "stochastic rounding", rounding_is_unbiased))
        rows.append(checked(preset, "layers against the emulation", layers_equal_the_emulation))
        print(*rows[-3:], sep="\n", flush=True)
    if native:
        for part in (step_times, losses):
            for row in part(native, options.quick):
                rows.append(row)
                print(row, flush=True)
    show("Blackwell, day one", ["preset", "check", "result", "seen"], rows, "cuda", options.csv)
    return int(any(row[2] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Time dispatch + combine of expert parallelism against transformers' own all-to-all in BF16.

    torchrun --nproc-per-node 2 benchmarks/bench_comm.py [--rows 4096 16384 65536] [--hidden 4096] [--csv FILE]
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 benchmarks/bench_comm.py    (the link slowed: through host memory)

Forward, routing and permutes included, experts left out: they return the rows they get. Routing is uniform; a rank has
rows / top-k tokens in BF16. Each number is the median over repetitions, of the slowest rank. "at 50 GB/s" is a model:
the same with nothing sent, measured, plus the bytes that leave a rank at 50 GB/s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from timing import show
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import expert_parallel as theirs

from lightning_nvfp4.comm.expert_parallel import Communication, CompressedAllToAll
from lightning_nvfp4.comm.link import LEGS, Link, Pending

MODEL_RATE = 50e9
ARMS = {
    "none": dict.fromkeys(LEGS, "none"),
    "s2f6": dict.fromkeys(LEGS, "s2f6"),
    "nvfp4, s2f6 back": {**dict.fromkeys(LEGS, "s2f6"), "dispatch_forward": "nvfp4"},
    "auto": dict.fromkeys(LEGS, "auto"),
}


class Identity(nn.Module):
    """Experts that return their rows."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return x."""
        return x


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--csv", default="bench_comm.csv")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (size, 1), mesh_dim_names=("ep", "tp"))
    table: list[list[str]] = []
    for rows in options.rows:
        tokens = rows // options.top_k
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, options.hidden, generator=generator).to(device, torch.bfloat16)
        scores = torch.rand(tokens, options.experts, generator=generator)
        ids = scores.topk(options.top_k).indices.to(device)
        weights = torch.rand(tokens, options.top_k, generator=generator).to(device)
        base = base_model = 0.0
        for name, legs in {"transformers BF16": None, **ARMS}.items():
            experts = Identity(options.experts // size)
            if legs is None:
                function: Any = theirs.AllToAllEP(experts, mesh["ep"], mesh["tp"])
                communication = None
            else:
                communication = Communication(dict(legs))
                function = CompressedAllToAll(experts, mesh["ep"], mesh["tp"], communication=communication)
            call = work(function, x, ids, weights, options.backward)
            call()  # auto chooses, kernels are compiled
            chosen = "" if communication is None else ", ".join(dict.fromkeys(communication.names.values()))
            if communication is not None:
                communication.traffic.take()
                call()
            sent = (1.0 if communication is None else communication.traffic.take()[0]) or 1.0
            if communication is None:
                away = int((ids // (options.experts // size) != rank).sum())
                sent = 2 * away * options.hidden * 2 * (2 if options.backward else 1)
            taken = slowest(milliseconds(call, device, options.repeats), device)
            with nothing_sent():
                rest = slowest(milliseconds(call, device, options.repeats // 2), device)
            model = rest + 1e3 * slowest(sent, device) / MODEL_RATE
            base, base_model = base or taken, base_model or model
            table.append(
                [
                    str(rows),
                    name if name != "auto" else f"auto: {chosen}",
                    f"{sent / 1e6:.1f}",
                    f"{taken:.3f}",
                    f"{base / taken:.2f}",
                    f"{rest:.3f}",
                    f"{model:.3f}",
                    f"{base_model / model:.2f}",
                ]
            )
    if rank == 0:
        way = "forward + backward" if options.backward else "forward"
        link = "NCCL_P2P_DISABLE=1" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "as it is"
        title = f"Dispatch + combine, {way}, {size} ranks, hidden {options.hidden}, top {options.top_k} of "
        title += f"{options.experts}, link {link}, seed 0"
        head = ["rows", "arm", "MB sent", "ms", "x transformers", "ms unsent", "ms at 50 GB/s", "x transformers"]
        show(title, head, table, device, options.csv)
    dist.destroy_process_group()


def work(function: Any, x: Tensor, ids: Tensor, weights: Tensor, backward: bool) -> Callable[[], object]:
    """Return a call of the forward, or of forward and backward."""
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return function(x, ids, weights)

        return forward
    leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)

    def both() -> None:
        leaf.grad = None
        function(leaf, ids, weights).backward(grad)

    return both


class Unsent(torch.autograd.Function):
    """Uninitialized rows in the place of received ones, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        """Return `rows` rows like those of `x`."""
        ctx.rows = len(x)
        return x.new_empty(rows, x.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return as many rows as `x` had."""
        return grad.new_empty(ctx.rows, grad.shape[1]), None


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Replace the exchange of rows by uninitialized ones, in both implementations; counts are still exchanged."""

    def ours(self: Link, rows: Tensor, send: Any, receive: Any, leg: str, num_columns: int) -> Pending:
        return Pending(rows.new_empty(sum(receive), rows.shape[1]), None, leg)

    def other(x: Tensor, receive: Any, send: Any, group: Any) -> Tensor:
        return Unsent.apply(x, sum(receive))

    with mock.patch.object(Link, "start", ours), mock.patch.object(theirs, "all_to_all_single_autograd", other):
        with mock.patch.object(theirs._WaitTensor, "apply", lambda x: x):
            yield


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a call, ranks starting together."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for i in range(repeats + 3):
        dist.barrier()
        wait()
        start = time.perf_counter()
        call()
        wait()
        if i >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def slowest(number: float, device: str) -> float:
    """Return the largest of all ranks'."""
    largest = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


if __name__ == "__main__":
    main()

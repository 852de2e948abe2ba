"""Time dispatch + combine of expert parallelism against transformers' own all-to-all in BF16.

    torchrun --nproc-per-node 2 benchmarks/bench_comm.py [--rows 4096 16384 65536] [--hidden 4096] [--csv FILE]
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 benchmarks/bench_comm.py    (the link slowed: through host memory)
    torchrun --nproc-per-node 2 benchmarks/bench_comm.py --overlap 1 2 4 [--ffn 1024] [--link-rate 1e8]

Forward, routing and permutes included, experts left out: they return the rows they get. Routing is uniform; a rank has
rows / top-k tokens in BF16. Each number is the median over repetitions, of the slowest rank. "at 50 GB/s" is a model:
the same with nothing sent, measured, plus the bytes that leave a rank at 50 GB/s.

With ``--overlap`` experts of two GEMMs in BF16 stand in between, and what is compared are overlap degrees, measured in
turn; each number is then that of the quickest repetition. "exposed" is what the same with nothing sent takes less: the
part of the transfers that is not hidden. On a CPU the link can be a modelled one, of ``--link-rate`` bytes a second for
each rank and direction: rows travel over gloo, and are handed over no sooner than such a link, which sends one transfer
after another, would have brought them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import weakref
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
    parser.add_argument("--overlap", type=int, nargs="+", metavar="DEGREE", help="compare these, with experts")
    parser.add_argument("--ffn", type=int, default=1024, help="inner width of the experts of --overlap")
    parser.add_argument("--link-rate", type=float, metavar="BYTES_PER_S", help="modelled, with --overlap on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.link_rate is not None and (device == "cuda" or not options.overlap):
        parser.error("--link-rate models the link of --overlap by waiting on the host: only on a CPU")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device, (size, 1), mesh_dim_names=("ep", "tp"))
    if options.overlap:
        compare_degrees(options, device, mesh["ep"])
        dist.destroy_process_group()
        return
    table: list[list[str]] = []
    for rows in options.rows:
        x, ids, weights = batch(options, rows, device)
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
        head = ["rows", "arm", "MB sent", "ms", "x transformers", "ms unsent", "ms at 50 GB/s", "x transformers"]
        show(title(options, "Dispatch + combine"), head, table, device, options.csv)
    dist.destroy_process_group()


def batch(options: argparse.Namespace, rows: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, ids and routing weights of this rank."""
    tokens = rows // options.top_k
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, options.hidden, generator=generator).to(device, torch.bfloat16)
    scores = torch.rand(tokens, options.experts, generator=generator)
    ids = scores.topk(options.top_k).indices.to(device)
    return x, ids, torch.rand(tokens, options.top_k, generator=generator).to(device)


def title(options: argparse.Namespace, what: str) -> str:
    """Return the heading of a table."""
    way = "forward + backward" if options.backward else "forward"
    link = "NCCL_P2P_DISABLE=1" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "as it is"
    if options.link_rate is not None:
        link = f"modelled at {options.link_rate / 1e6:g} MB/s"
    size = f"{dist.get_world_size()} ranks, hidden {options.hidden}, top {options.top_k} of {options.experts}"
    return f"{what}, {way}, {size}, link {link}, seed 0"


class Experts(nn.Module):
    """Experts of two GEMMs in BF16, without biases."""

    def __init__(self, num_experts: int, hidden: int, ffn: int, device: str) -> None:
        super().__init__()
        self.num_experts = num_experts
        shapes = (num_experts, hidden, ffn), (num_experts, ffn, hidden)
        self.up, self.down = (
            nn.Parameter((torch.randn(shape) / shape[1] ** 0.5).to(device, torch.bfloat16)) for shape in shapes
        )

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of rows that are sorted by expert."""
        experts = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(index.reshape(-1), experts, right=True).to(torch.int32)
        inner = torch.nn.functional.silu(torch._grouped_mm(x, self.up, offs=ends))
        return torch._grouped_mm(inner, self.down, offs=ends)


def compare_degrees(options: argparse.Namespace, device: str, mesh: Any) -> None:
    """Measure and print a table over rows, codecs and overlap degrees."""
    size, table = dist.get_world_size(), []
    experts = Experts(options.experts // size, options.hidden, options.ffn, device)
    for rows in options.rows:
        tensors = batch(options, rows, device)
        for name in ("none", "s2f6"):
            calls, sent = {}, 0
            for degree in options.overlap:
                communication = Communication(ARMS[name], overlap_degree=degree)
                function = CompressedAllToAll(experts, mesh, None, communication=communication)
                calls[degree] = work(function, *tensors, options.backward)
                calls[degree]()
                sent = communication.traffic.take()[0]
            times: dict[tuple[int, bool], list[float]] = {}
            for _ in range(options.repeats):
                for degree, call in calls.items():
                    for unsent in (False, True):
                        with nothing_sent() if unsent else modelled_link(options.link_rate):
                            times.setdefault((degree, unsent), []).append(once(call, device))
            best = {key: min(slowest(time, device) for time in found) for key, found in times.items()}
            wire = "" if options.link_rate is None else f"{1e3 * slowest(sent, device) / options.link_rate:.1f}"
            row = [str(rows), name, f"{sent / 1e6:.1f}", wire]
            for degree in options.overlap:
                taken, rest = best[degree, False], best[degree, True]
                row += [f"{taken:.1f}", f"{taken - rest:.1f}"]
            table.append(row)
    if dist.get_rank() == 0:
        head = ["rows", "codec", "MB sent", "ms on the link"]
        head += [word for degree in options.overlap for word in (f"degree {degree}: ms", "exposed")]
        show(title(options, f"Dispatch + experts of {options.ffn} + combine"), head, table, device, options.csv)


@contextmanager
def modelled_link(rate: float | None) -> Iterator[None]:
    """Hand rows over no sooner than a link of `rate` bytes a second each way, one after another, brings them."""
    if rate is None:
        yield
        return
    start, wait, idle = Link.start, Pending.wait, time.perf_counter()
    arrivals: weakref.WeakKeyDictionary[Pending, float] = weakref.WeakKeyDictionary()

    def started(self: Link, rows: Tensor, send: Any, receive: Any, leg: str, num_columns: int) -> Pending:
        nonlocal idle
        pending = start(self, rows, send, receive, leg, num_columns)
        idle = max(idle, time.perf_counter()) + max(sum(send), sum(receive)) * rows.shape[1] / rate
        arrivals[pending] = idle
        return pending

    def waited(self: Pending) -> Tensor:
        time.sleep(max(0.0, arrivals[self] - time.perf_counter()))
        return wait(self)

    with mock.patch.object(Link, "start", started), mock.patch.object(Pending, "wait", waited):
        yield


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
    """Return the median time of a call."""
    return statistics.median([once(call, device) for _ in range(repeats + 3)][3:])


def once(call: Callable[[], object], device: str) -> float:
    """Return the milliseconds that a call takes, ranks starting together."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    dist.barrier()
    wait()
    start = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - start)


def slowest(number: float, device: str) -> float:
    """Return the largest of all ranks'."""
    largest = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


if __name__ == "__main__":
    main()

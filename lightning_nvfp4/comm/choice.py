"""``codec: auto``: time each codec on the rows at hand and take the fastest that costs little accuracy."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nvfp4.comm.all_to_all import (
    Exchange,
    finish_to_rows,
    finish_to_tokens,
    start_to_rows,
    start_to_tokens,
)
from lightning_nvfp4.comm.codec import AUTO, CODECS
from lightning_nvfp4.comm.link import LEGS

CANDIDATES = ("none", "s2f6")
"""MXFP8 is as large as S2F6 and less exact; NVFP4 is a candidate where the experts take its codes as they are."""
_WARM_UP, _REPEATS = 2, 5


class Choice(NamedTuple):
    """The codec of each leg, and the milliseconds that each candidate took on the slowest rank."""

    names: dict[str, str]
    milliseconds: dict[str, dict[str, float]]

    def summary(self) -> str:
        """Return one line."""
        legs = (
            f"{leg} {self.names[leg]} (" + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()) + ")"
            for leg, times in self.milliseconds.items()
        )
        return "codec auto: " + "; ".join(legs)


def choose(names: Mapping[str, str], x_TD: Tensor, exchange: Exchange, dtype: torch.dtype, takes_nvfp4: bool) -> Choice:
    """Replace ``auto`` among the codecs of the legs; a collective over all ranks, which choose alike.

    Args:
        names: codec of each leg.
        x_TD: tokens of this rank.
        exchange: their route.
        dtype: of the rows.
        takes_nvfp4: the experts make the same NVFP4 codes of the rows.
    """
    undecided = [leg for leg in LEGS if names[leg] == AUTO]
    y_RD = x_TD.new_zeros(exchange.route.num_rows, x_TD.shape[1], dtype=dtype)
    times: dict[str, dict[str, float]] = {}
    traffic = exchange.link.traffic.copy()
    for leg in undecided:
        names_here = [*CANDIDATES, *(["nvfp4"] if leg == "dispatch_forward" and takes_nvfp4 else [])]
        times[leg] = {}
        for name in names_here:
            trial = replace(exchange, codecs={leg: CODECS[name]})
            if leg in ("dispatch_forward", "combine_backward"):
                work = functools.partial(_to_rows, x_TD, trial, leg, dtype)
            else:
                work = functools.partial(_to_tokens, y_RD, trial, leg)
            times[leg][name] = _slowest(_milliseconds(work, x_TD.device), x_TD.device)
    exchange.link.traffic.restore(traffic)
    chosen = {leg: min(times[leg], key=times[leg].__getitem__) for leg in undecided}
    if exchange.link.group is not None:
        decided = [chosen]
        dist.broadcast_object_list(decided, src=0)
        chosen = decided[0]
    return Choice({**names, **chosen}, times)


def _to_rows(x_TD: Tensor, exchange: Exchange, leg: str, dtype: torch.dtype) -> None:
    finish_to_rows(start_to_rows(x_TD, None, exchange, leg, dtype), exchange)


def _to_tokens(y_RD: Tensor, exchange: Exchange, leg: str) -> None:
    finish_to_tokens(start_to_tokens(y_RD, exchange, leg), exchange)


@torch.no_grad()
def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for i in range(_WARM_UP + _REPEATS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if i >= _WARM_UP:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _slowest(milliseconds: float, device: torch.device) -> float:
    if not dist.is_initialized():
        return milliseconds
    slowest = torch.tensor(milliseconds, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)

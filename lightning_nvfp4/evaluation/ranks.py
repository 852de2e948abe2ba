"""Processes that share the documents of an evaluation, as ``torchrun`` and ``accelerate launch`` start them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of an evaluation.

    Attributes:
        device: to compute on.
        rank: of this process.
        size: how many there are.
        accelerator: of accelerate, as lm-evaluation-harness wants it; None where there is one process.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    accelerator: Any = None

    def from_first(self, value: T) -> T:
        """Return the first process's `value`."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def shared_ranks(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that the environment (WORLD_SIZE, RANK, LOCAL_RANK) tells of; a lone process joins nothing.

    Args:
        device: ``auto`` (CUDA where there is one, the local rank's), ``cpu``, ``cuda``.
    """
    cuda = torch.cuda.is_available() if device == "auto" else torch.device(device).type == "cuda"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(torch.device(("cuda" if cuda else "cpu") if device == "auto" else device))
        return
    from accelerate import Accelerator

    joined_before = dist.is_initialized()
    accelerator = Accelerator(cpu=not cuda)
    try:
        yield Ranks(accelerator.device, accelerator.process_index, accelerator.num_processes, accelerator)
    finally:
        if not joined_before:
            dist.destroy_process_group()

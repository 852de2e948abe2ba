"""The wire between the ranks of an expert-parallel group: one collective a transfer, counted, with a clear failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LEGS = ("dispatch_forward", "combine_forward", "dispatch_backward", "combine_backward")


class RankLostError(RuntimeError):
    """A collective failed because another rank has ended, or hangs."""


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Turn the failure of a collective inside into a `RankLostError` that says so.

    Over NCCL a rank that is gone shows first as a timeout, with which torch's watchdog ends the process by itself.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLostError) or not _of_collective(error):
            raise
        raise RankLostError(
            f"{what}: rank {dist.get_rank()} of {dist.get_world_size()} could not communicate: "
            f"{str(error).strip()[:500]} Another rank has ended or hangs; this one only waited for it. Look at the log "
            "of the rank that stopped first, then continue from the last checkpoint."
        ) from error


def _of_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "Gloo", "NCCL"))


class Traffic:
    """What this rank has put on the wire since it was last taken, by leg.

    Attributes:
        sent: bytes handed to collectives for other ranks.
        bf16: bytes that the same rows would take in BF16.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.bf16: Counter[str] = Counter()

    def add(self, leg: str, sent: int, bf16: int) -> None:
        """Count one transfer."""
        self.sent[leg] += sent
        self.bf16[leg] += bf16

    def copy(self) -> Traffic:
        """Return a copy, for `restore`."""
        copy = Traffic()
        copy.restore(self)
        return copy

    def restore(self, earlier: Traffic) -> None:
        """Forget what was counted since a copy was made."""
        self.sent, self.bf16 = Counter(earlier.sent), Counter(earlier.bf16)

    def take(self) -> tuple[int, int]:
        """Return the sums (sent, bf16) over the legs, and start anew."""
        sums = self.sent.total(), self.bf16.total()
        self.sent.clear()
        self.bf16.clear()
        return sums


class Link:
    """An expert-parallel group as seen from this rank.

    Attributes:
        group: its process group; ``None`` for a group of this rank alone.
        size: ranks in it.
        rank: of this process in it.
        sources: number of each member among all processes, by which its tokens are known.
        traffic: counts what is sent.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.group, self.traffic = group, traffic
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        alone = [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
        self.sources = alone if group is None else dist.get_process_group_ranks(group)

    def swap_counts(self, counts: Tensor) -> Tensor:
        """Return the counts (P, ...) of rows that come from each rank, for those (P, ...) that go there."""
        if self.group is None:
            return counts
        counts = counts.contiguous()
        received = torch.empty_like(counts)
        with reported("expert parallelism, exchange of counts"):
            dist.all_to_all_single(received, counts, group=self.group)
        return received

    def start(
        self, rows_RB: Tensor, send: Sequence[int], receive: Sequence[int], leg: str, num_columns: int
    ) -> Pending:
        """Begin to send rows to, and receive rows from, each rank; nothing is sent to this one itself.

        Args:
            rows_RB: uint8, the rows for rank 0 first.
            send: rows for each rank.
            receive: rows from each rank.
            leg: one of `LEGS`.
            num_columns: elements of a row, for the count.
        """
        self.traffic.add(leg, rows_RB.numel(), 2 * rows_RB.shape[0] * num_columns)
        out = rows_RB.new_empty(sum(receive), rows_RB.shape[1])
        if self.group is None:
            return Pending(out, None, leg)
        with reported(f"expert parallelism, {leg}"):
            work = dist.all_to_all_single(out, rows_RB, list(receive), list(send), group=self.group, async_op=True)
        return Pending(out, (work, rows_RB), leg)


class Pending:
    """A transfer on its way."""

    def __init__(self, out: Tensor, work: tuple[Any, Tensor] | None, leg: str) -> None:
        self._out, self._work, self._leg = out, work, leg

    def wait(self) -> Tensor:
        """Return the received rows uint8, those of rank 0 first."""
        if self._work is not None:
            work, _ = self._work  # what is sent has to live until here
            with reported(f"expert parallelism, {self._leg}"):
                work.wait()
            self._work = None
        return self._out

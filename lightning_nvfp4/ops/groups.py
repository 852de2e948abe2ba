"""Which rows belong to which expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert: each expert's rows follow those of the one before.

    Counts that the host knows are a tuple; where only the device knows them they are `offsets`, and nothing waits.

    Attributes:
        num: experts E.
        counts: rows of each expert, or ``None``.
        offsets: int32 (E + 1) first row of each expert and the end of the last, or ``None``. Every row has an expert.
    """

    num: int
    counts: tuple[int, ...] | None = None
    offsets: Tensor | None = None

    @staticmethod
    def of(counts: Sequence[int] | Groups) -> Groups:
        """Return groups of counts that the host knows."""
        return counts if isinstance(counts, Groups) else Groups(len(counts), counts=tuple(counts))

    def on_host(self) -> tuple[int, ...]:
        """Return the counts; waits for the device where only it knows them."""
        if self.counts is not None:
            return self.counts
        assert self.offsets is not None
        return tuple(self.offsets.diff().tolist())

    def on_device(self, device: torch.device) -> Tensor:
        """Return the offsets."""
        if self.offsets is not None:
            return self.offsets
        assert self.counts is not None
        # Made once: a copy from the host would be waited for in every layer.
        return (_offsets if torch.compiler.is_compiling() else _kept_offsets)(self.counts, device)

    def expert_of(self, rows: Tensor) -> Tensor:
        """Return the expert (int64) that each row (its number) belongs to."""
        ends = self.on_device(rows.device)[1:]
        return torch.searchsorted(ends, rows.to(torch.int32), right=True)


def _offsets(counts: tuple[int, ...], device: torch.device) -> Tensor:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return torch.tensor(ends, dtype=torch.int32, device=device)


_kept_offsets = functools.lru_cache(256)(_offsets)

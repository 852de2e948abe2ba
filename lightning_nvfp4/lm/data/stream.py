"""A row stream: shards read one after the other, shuffled in blocks, pass after pass, resumable at any row.

Shuffling, and the ordering by difficulty where there is one, is a pure function of (seed, pass, block). In each pass
the order of the shards is drawn anew; rows are read in that order into blocks of `shuffle_rows`, across the shards'
ends, and each block is permuted. So a position is a handful of integers: the place where the block begins and how many
of its rows are used up. Resuming reads that one block again and nothing before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.readers import Cursor, Reader, Row
from lightning_nvfp4.lm.data.sources import Shard

Item = TypeVar("Item")
Position = dict[str, Any]
"""`epoch block shard cursor` (where the block begins), `taken` (rows of it used up), `offset` (into the next row)."""

_SHARDS, _ROWS = 0, 1


@dataclass(frozen=True)
class Block(Generic[Item]):
    """Rows in their final order. `items[:taken]` were used up before; `start` lacks `taken` and `offset`."""

    items: list[Item]
    taken: int
    offset: int
    start: Position

    def position(self, taken: int, offset: int = 0) -> Position:
        """Return the position after `taken` rows of this block and `offset` units of the next one."""
        return {**self.start, "taken": taken, "offset": offset}


class RowStream(Generic[Item]):
    """Blocks of rows of `shards`.

    Args:
        shards: What to read.
        read: Makes an item of a row; it gets the row and its name for messages, and returns None to leave it out.
        seed: Seeds the order; the order of shards and rows is kept where it is None.
        shuffle_rows: Rows of a block, the memory that shuffling takes.
        repeat: Go on with another pass after the last row, for ever.
        difficulty: Gives an item's difficulty, by which each block is ordered as far as `curriculum` says.
        curriculum: 0 leaves the order to the seed, 1 goes from the easiest to the hardest item of each block; between
            them an item's place is the weighted mean of its places in both orders.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[Row, str], Item | None],
        *,
        seed: int | None,
        shuffle_rows: int,
        repeat: bool = True,
        difficulty: Callable[[Item], float] | None = None,
        curriculum: float = 0.0,
    ) -> None:
        self.shards = list(shards)
        self._read = read
        self._seed = seed
        self._shuffle_rows = shuffle_rows
        self._repeat = repeat
        self._difficulty = difficulty if curriculum > 0 else None
        self._curriculum = curriculum

    def blocks(self, position: Position | None = None) -> Iterator[Block[Item]]:
        """Yield blocks from a position on (None: from the beginning).

        Raises `UserError` for a malformed row and for a pass that gives no row.
        """
        position = position or {"epoch": 0, "block": 0, "shard": 0, "cursor": None, "taken": 0, "offset": 0}
        epoch, number, taken, offset = (position[name] for name in ("epoch", "block", "taken", "offset"))
        run = _Pass(self._order(epoch), epoch, position["shard"], position["cursor"])
        try:
            while True:
                start = {"epoch": epoch, "block": number, **run.place()}
                items = run.take(self._shuffle_rows, self._read)
                if items:
                    yield Block(self._permuted(items, epoch, number), taken, offset, start)
                    number += 1
                elif number == 0:
                    raise UserError(f"{_names(self.shards)}: no usable row. Check that the files hold data.")
                elif self._repeat:
                    epoch, number = epoch + 1, 0
                    run = _Pass(self._order(epoch), epoch, 0, None)
                else:
                    return
                taken = offset = 0
        finally:
            run.close()

    def _order(self, epoch: int) -> list[Shard]:
        if self._seed is None:
            return self.shards
        return [self.shards[i] for i in self._permutation(len(self.shards), epoch, _SHARDS, 0)]

    def _permuted(self, items: list[Item], epoch: int, number: int) -> list[Item]:
        if self._seed is None:
            return items
        shuffled = [items[i] for i in self._permutation(len(items), epoch, _ROWS, number)]
        if self._difficulty is None:
            return shuffled
        easy_first = np.argsort([self._difficulty(item) for item in shuffled], kind="stable").argsort()
        places = self._curriculum * easy_first + (1 - self._curriculum) * np.arange(len(shuffled))
        return [shuffled[i] for i in np.argsort(places, kind="stable")]

    def _permutation(self, count: int, epoch: int, what: int, number: int) -> list[int]:
        assert self._seed is not None
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch, what, number])))
        return rng.permutation(count).tolist()


class _Pass:
    """One pass over the shards, in the given order."""

    def __init__(self, shards: list[Shard], epoch: int, shard: int, cursor: Cursor | None) -> None:
        self._shards = shards
        self._epoch = epoch
        self._index = shard
        self._cursor = cursor
        self._reader: Reader | None = None
        self._empty = cursor is None

    def place(self) -> Position:
        cursor = self._cursor if self._reader is None else self._reader.cursor()
        return {"shard": self._index, "cursor": cursor}

    def take(self, count: int, read: Callable[[Row, str], Item | None]) -> list[Item]:
        """Read up to `count` items; fewer only at the end of the pass."""
        items: list[Item] = []
        while len(items) < count and self._index < len(self._shards):
            shard = self._shards[self._index]
            if self._reader is None:
                self._reader = shard.open(self._cursor, self._epoch)
            row = next(self._reader, None)
            if row is None:
                if self._empty and not self._reader.may_be_empty:
                    raise UserError(f"{shard.label}: the file holds no row. Delete it or write it again.")
                self.close()
                self._index += 1
                self._empty = True
                continue
            self._empty = False
            item = read(row, self._reader.where())
            if item is not None:
                items.append(item)
        return items

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._cursor = None


def _names(shards: Sequence[Shard]) -> str:
    labels = [shard.label for shard in shards]
    return ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")

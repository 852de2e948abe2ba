"""Loaders that Lightning resumes exactly: their state is the position after the batch that was delivered last.

A training loader has a length, because without one Lightning fetches a batch ahead and loses it on resume. Its state is
the same on every rank (Lightning keeps only rank 0's), and does not depend on batch size or number of ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_nvfp4.lm.data.stream import Position

Batch = dict[str, Any]
Examples = Callable[[Position | None], Iterator[tuple[Any, Position]]]
"""Endless examples from a position on, each with the position after it."""

T = TypeVar("T")
_STATE_VERSION = 1
_BATCHES_AHEAD = 2


class StreamLoader:
    """Endless batches of one rank: batch k of rank r is batch k * num_ranks + r of a single rank.

    Args:
        examples: Gives the examples of all ranks.
        collate: Makes a batch of `batch_size` examples.
        batch_size: Examples of a batch of one rank.
        length: Batches of what Lightning calls an epoch; the next one goes on where it ended.
        rank, num_ranks: Place among the data-parallel ranks.
        fingerprint: Names the configuration of the data; a state with another one is not used.
        background: Prepare batches in a background thread.
        in_flight: Tells whether the batch delivered last is not trained on yet; a state then stands before it.
    """

    def __init__(
        self,
        examples: Examples,
        collate: Callable[[list[Any]], Batch],
        *,
        batch_size: int,
        length: int,
        fingerprint: str,
        rank: int = 0,
        num_ranks: int = 1,
        background: bool = False,
        in_flight: Callable[[], bool] = lambda: False,
    ) -> None:
        self._examples = examples
        self._collate = collate
        self._batch_size = batch_size
        self._length = length
        self._fingerprint = fingerprint
        self._rank, self._num_ranks = rank, num_ranks
        self._background = background
        self._in_flight = in_flight
        self._position: Position | None = None
        self._before: Position | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches(self._position)
        if self._background:
            batches = in_background(batches, _BATCHES_AHEAD)
        for batch, position in batches:
            self._before, self._position = self._position, position
            yield batch

    def _batches(self, position: Position | None) -> Iterator[tuple[Batch, Position]]:
        examples = self._examples(position)
        first = self._rank * self._batch_size
        while True:
            step = [next(examples) for _ in range(self._batch_size * self._num_ranks)]
            mine = [example for example, _ in step[first : first + self._batch_size]]
            yield self._collate(mine), step[-1][1]

    def state_dict(self) -> dict[str, Any]:
        """Return plain scalars: loads with `weights_only=True`."""
        position = self._before if self._in_flight() else self._position
        return {"version": _STATE_VERSION, "fingerprint": self._fingerprint, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved position; where the data are configured differently, say so and start at the beginning."""
        if state.get("version") != _STATE_VERSION or state.get("fingerprint") != self._fingerprint:
            rank_zero_info(
                "The checkpoint was written with other data (files, seed, tokenizer or shuffling): "
                "the data stream starts at its beginning."
            )
            return
        self._position = self._before = state["position"]


class BatchList:
    """A fixed list of batches, for validation."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


class NoLoader(CombinedLoader):
    """No validation loader at all. Lightning warns of an empty list of loaders, and skips this in silence."""

    def __init__(self) -> None:
        super().__init__([], "sequential")

    @property
    def flattened(self) -> list[Any]:
        """The loaders: none."""
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        del flattened


def in_background(items: Iterator[T], ahead: int) -> Iterator[T]:
    """Yield `items`, made by a thread that is up to `ahead` of them ahead; its errors are raised here."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(ahead)
    stop = threading.Event()

    def put(entry: tuple[T | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return ready.put(entry, timeout=0.2)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put((item, None))
                if stop.is_set():
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=work, name="data", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # pyright: ignore[reportReturnType]
    finally:
        stop.set()
        thread.join()

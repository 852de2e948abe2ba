"""Rewards computed beside the sampling: those of one batch of completions while the next batch is generated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Components = dict[str, list[float]]
"""A reward's name -> its values, one a completion."""


class RewardWorkers:
    """Runs `score` in `num_workers` threads, or at once where there are none.

    Threads suffice: rewards that take long wait for a process of their own (the sandbox, math-verify).
    """

    def __init__(self, score: Callable[[list[str], list[dict[str, Any]]], Components], num_workers: int) -> None:
        self._score = score
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reward") if num_workers else None

    def submit(self, completions: list[str], references: list[dict[str, Any]]) -> Future[Components]:
        """Return the rewards to come."""
        if self._pool is not None:
            return self._pool.submit(self._score, completions, references)
        done: Future[Components] = Future()
        done.set_result(self._score(completions, references))
        return done

    def close(self) -> None:
        """Give up what has not begun and wait for the rest."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

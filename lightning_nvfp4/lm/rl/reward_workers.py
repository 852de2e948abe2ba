"""Rewards computed beside the sampling: those of one batch of completions while the next batch is generated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from lightning_nvfp4.errors import UserError

Components = dict[str, list[float]]
"""A reward's name -> its values, one a completion."""


class RewardWorkers:
    """Runs `score` in `num_workers` threads, or at once where there are none.

    Threads suffice: rewards that take long wait for a process of their own (the sandbox, math-verify). They are no
    reason for the process to stay when it ends, so that one that hangs cannot keep it.

    Args:
        score: of completions and references.
        num_workers: threads.
        timeout: wall seconds to wait for a batch in a thread.
    """

    def __init__(
        self, score: Callable[[list[str], list[dict[str, Any]]], Components], num_workers: int, timeout: float = 600.0
    ) -> None:
        self._score, self._num_workers, self._timeout = score, num_workers, timeout
        self._waiting: SimpleQueue[tuple[Future[Components], list[str], list[dict[str, Any]]] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def submit(self, completions: list[str], references: list[dict[str, Any]]) -> Future[Components]:
        """Return the rewards to come."""
        future: Future[Components] = Future()
        if not self._num_workers:
            future.set_result(self._score(completions, references))
            return future
        while len(self._threads) < self._num_workers:
            self._threads.append(Thread(target=self._work, name=f"reward-{len(self._threads)}", daemon=True))
            self._threads[-1].start()
        self._waiting.put((future, completions, references))
        return future

    def result(self, future: Future[Components]) -> Components:
        """Wait for rewards.

        Raises:
            UserError: they take longer than the limit.
        """
        try:
            return future.result(self._timeout)
        except TimeoutError as error:
            if future.done():  # the reward's own
                raise
            raise UserError(
                f"The rewards of a batch of completions were not there after reward_timeout = {self._timeout} s: a "
                "reward function hangs or is too slow. Mend it, set reward_timeout, or give more reward_workers."
            ) from error

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, completions, references = task
            try:
                future.set_result(self._score(completions, references))
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """Let the threads end after what they are at."""
        for _ in self._threads:
            self._waiting.put(None)
        self._threads = []

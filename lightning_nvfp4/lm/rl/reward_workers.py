"""Rewards computed beside the sampling: those of one batch of completions while the next batch is generated."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import FrameType
from typing import Any

from lightning_nvfp4.errors import UserError

Components = dict[str, list[float]]
"""A reward's name -> its values, one a completion."""

_PYTHON = os.path.dirname(threading.__file__)
_AGAIN_SECONDS = 1.0  # a reward function may swallow what an alarm raises


class RewardWorkers:
    """Runs `score` in `num_workers` threads, or at once where there are none, and not for longer than `timeout`.

    Threads suffice: rewards that take long wait for a process of their own (the sandbox, math-verify). They are no
    reason for the process to stay when it ends, so that one that hangs cannot keep it. At once, the limit is an alarm
    of the process (SIGALRM) in its main thread; a reward function that sets alarms of its own replaces it.

    Args:
        score: of completions and references.
        num_workers: threads.
        timeout: wall seconds for a batch.
        name: of what is scored with, for errors.

    Raises:
        UserError: a limit that is no number of seconds.
    """

    def __init__(
        self,
        score: Callable[[list[str], list[dict[str, Any]]], Components],
        num_workers: int,
        timeout: float = 600.0,
        name: str = "reward",
    ) -> None:
        if not 0 < timeout < math.inf:
            raise UserError(f"reward_timeout is {timeout}: it must be a number of seconds above 0.")
        self._score, self._num_workers, self._timeout, self._name = score, num_workers, timeout, name
        self._waiting: SimpleQueue[tuple[Future[Components], list[str], list[dict[str, Any]]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._working: dict[Future[Components], int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the settings alone: averaged weights copy a whole module, and threads and their queue have no copies."""
        return type(self), (self._score, self._num_workers, self._timeout, self._name)

    def submit(self, completions: list[str], references: list[dict[str, Any]]) -> Future[Components]:
        """Return the rewards to come."""
        future: Future[Components] = Future()
        if not self._num_workers:
            future.set_result(self._at_once(completions, references))
            return future
        while len(self._threads) < self._num_workers:
            name = f"reward-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
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
            thread = self._working.get(future, next(iter(self._working.values()), 0))
            raise self._late(sys._current_frames().get(thread)) from error

    def _at_once(self, completions: list[str], references: list[dict[str, Any]]) -> Components:
        if threading.current_thread() is not threading.main_thread():  # which alone takes signals
            return self._score(completions, references)
        late: list[UserError] = []

        def expire(number: int, frame: FrameType | None) -> None:
            late.append(self._late(frame))
            raise _Expired

        handler, start = signal.signal(signal.SIGALRM, expire), time.monotonic()
        left, interval = signal.setitimer(signal.ITIMER_REAL, self._timeout, _AGAIN_SECONDS)
        try:
            components = self._score(completions, references)
        except _Expired:
            components = {}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), interval)
        if late:
            raise late[0]
        return components

    def _late(self, frame: FrameType | None) -> UserError:
        stack = traceback.extract_stack(frame) if frame else []
        # The line that waits, not what it calls of Python's own.
        theirs = [f for f in stack if not f.filename.startswith(_PYTHON) or "site-packages" in f.filename]
        where = f", and is at line {theirs[-1].lineno} of {theirs[-1].filename}" if theirs else ""
        return UserError(
            f"{self._name} has not scored a batch of completions within reward_timeout = {self._timeout} s{where}: it "
            "hangs or is too slow. Mend it, or raise model.reward_timeout."
        )

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, completions, references = task
            self._working[future] = threading.get_ident()
            try:
                future.set_result(self._score(completions, references))
            except BaseException as error:
                future.set_exception(error)
            del self._working[future]

    def close(self) -> None:
        """Let the threads end after what they are at."""
        for _ in self._threads:
            self._waiting.put(None)
        self._threads = []


class _Expired(BaseException):
    """The time is up; no `Exception`, which reward functions catch."""

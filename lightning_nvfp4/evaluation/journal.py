"""Answers as they come, on disk: an evaluation that was killed goes on where it stopped.

lm-evaluation-harness's own cache (`CachingLM`) is no substitute: it does not know whose answers it holds, keeps none
that were sampled, and forms other batches after an interruption, which in 16 bits gives other likelihoods. Here a line
is a batch, whole or absent, so the batches that are left are those of an evaluation that never stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lightning_nvfp4.errors import UserError


class Journal:
    """Answers to requests, by what was asked, in the order of asking.

    Args:
        path: JSON Lines; the first line says whose answers these are. None = nothing is kept.
        identity: plain data on all that an answer depends on besides the request. The file of another is moved aside,
            to ``<path>.old``.

    Raises:
        UserError: the file cannot be read or written, a line in it is no batch, or another process is writing it.
    """

    def __init__(self, path: Path | None, identity: Any = None) -> None:
        self.path = path
        self._answers: dict[str, list[Any]] = {}
        self._batch: list[tuple[str, Any]] = []
        self._stream: BinaryIO | None = None
        if path is None:
            return
        try:
            self._open(path, json.dumps({"identity": identity}, sort_keys=True, default=str).encode() + b"\n")
        except OSError as error:
            self.close()
            raise UserError(f"{path}: answers cannot be kept there ({error}). Write the result elsewhere.") from error
        except UserError:
            self.close()
            raise

    def _open(self, path: Path, head: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = self._stream = _locked(path)
        lines = stream.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # torn
        if lines and lines[0] != head:
            path.replace(path.with_name(f"{path.name}.old"))
            stream.close()
            stream = self._stream = _locked(path)
            lines = []
        for number, line in enumerate(lines[1:], start=2):
            self._take(line, number)
        stream.truncate(sum(map(len, lines)))
        if not lines:
            self._write(head)

    def _take(self, line: bytes, number: int) -> None:
        try:
            for key, answer in json.loads(line):
                self._answers.setdefault(key, []).append(answer)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self.path}, line {number}: no batch of answers ({error}), found {line[:40]!r}. Delete that line to "
                "have it computed again, or the file to begin anew."
            ) from error

    def _write(self, line: bytes) -> None:
        if self._stream is not None:
            self._stream.write(line)
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def answers(self, keys: Sequence[str]) -> list[Any]:
        """Return what is known for each key, None for the rest; a key asked again gets its next answer."""
        asked: Counter[str] = Counter()
        found = []
        for key in keys:
            known = self._answers.get(key, ())
            found.append(known[asked[key]] if asked[key] < len(known) else None)
            asked[key] += 1
        return found

    def count(self, key: str) -> int:
        """Return how many answers to `key` there are."""
        return len(self._answers.get(key, ()))

    def add(self, key: str, answer: Any) -> None:
        """Take down an answer; it is kept from the next `flush` on."""
        self._batch.append((key, answer))
        self._answers.setdefault(key, []).append(answer)

    def flush(self) -> None:
        """Write what was added since the last time as one batch."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        try:
            self._write(json.dumps(batch).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"{self.path}: an answer cannot be written ({error}). Make room there and run the same again: it goes "
                "on after the last whole batch."
            ) from error

    def close(self) -> None:
        """Let go of the file, which stays."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._stream.close()
            self._stream = None

    def delete(self) -> None:
        """Remove the file: its answers are in the result."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()


def _locked(path: Path) -> BinaryIO:
    """Open a file to read and append to, which one process at a time has; it is made where there is none."""
    stream = path.open("a+b")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise UserError(f"{path}: another evaluation is writing it. Wait for it, or write to another --out.") from None
    except OSError:  # a file system without locks
        pass
    stream.seek(0)
    return stream


def request_key(kind: str, arguments: Sequence[Any]) -> str:
    """Return the key of a request of lm-evaluation-harness: a hash of its kind and content."""
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True, default=str).encode()).hexdigest()[:32]

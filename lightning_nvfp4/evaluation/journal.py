"""Answers as they come, on disk: an evaluation that was killed goes on where it stopped.

lm-evaluation-harness's own cache (`CachingLM`) is no substitute: it does not know whose answers it holds, keeps none
that were sampled, and forms other batches after an interruption, which in 16 bits gives other likelihoods. Here a line
is a batch, whole or absent, so the batches that are left are those of an evaluation that never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError


class Journal:
    """Answers to requests, by what was asked, in the order of asking.

    Args:
        path: JSON Lines; the first line says whose answers these are. None = nothing is kept.
        identity: plain data on all that an answer depends on besides the request; a file of another is begun anew.

    Raises:
        UserError: the file cannot be read or written.
    """

    def __init__(self, path: Path | None, identity: Any = None) -> None:
        self.path = path
        self._answers: dict[str, list[Any]] = {}
        self._batch: list[tuple[str, Any]] = []
        if path is None:
            return
        head = json.dumps({"identity": identity}, sort_keys=True, default=str)
        try:
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last end is torn
            if not lines or lines[0] != head.encode():
                lines = []
            for line in lines[1:]:
                for key, answer in json.loads(line):
                    self._answers.setdefault(key, []).append(answer)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(line + b"\n" for line in (lines or [head.encode()])))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: unfinished evaluation cannot be continued ({error}). Delete the file.") from error

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
        if self.path is None or not batch:
            return
        with self.path.open("ab") as stream:
            stream.write(json.dumps(batch).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def delete(self) -> None:
        """Remove the file: its answers are in the result."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def request_key(kind: str, arguments: Sequence[Any]) -> str:
    """Return the key of a request of lm-evaluation-harness: a hash of its kind and content."""
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True, default=str).encode()).hexdigest()[:32]

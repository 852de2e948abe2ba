"""`rollouts.jsonl`: what the policy said, a few completions a step, bounded in size."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20


class RolloutLog:
    """Appends rows of `{"step", "prompt", "completion", "reward", "truncated"}` to a JSON-lines file.

    Args:
        path: the file; its folder is made at the first row.
        max_bytes: rows that would make the file longer are dropped.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def rewind(self, step: int) -> None:
        """Drop the rows of `step` and later, which a run resumed at `step` writes again, and a row cut by a crash."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:  # text has line ends of its own, such as U+2028
            lines = list(file)
        kept = [line for line in lines if _is_before(line, step)]
        if len(kept) == len(lines):
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, self.path)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows, as far as the bound allows."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        size = self.path.stat().st_size if self.path.exists() else 0
        if size + len(text.encode()) > self.max_bytes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)


def _is_before(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] < step
    except (ValueError, KeyError, TypeError):  # damaged: a log is no reason to refuse a run
        return False

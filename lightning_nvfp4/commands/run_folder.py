"""The folder that a fit writes: one writer at a time, and nothing left behind by a run that was refused."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lightning_nvfp4.errors import UserError


class RunFolder:
    """A context manager; `enter` claims the folder, once the configuration has told which it is."""

    def __init__(self) -> None:
        self._created: list[Path] = []
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        return self

    def enter(self, root: Path) -> None:
        """Make `root` where it is missing and lock it until the end.

        Raises:
            UserError: it cannot be made or written, or another fit is writing it.
        """
        try:
            missing = [folder for folder in (root, *root.parents) if not folder.exists()]
            root.mkdir(parents=True, exist_ok=True)
            self._created += missing
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(None, "no permission to write")
            self._lock = os.open(root, os.O_RDONLY)
        except OSError as error:
            raise UserError(
                f"trainer.default_root_dir = {str(root)!r} cannot be written ({error.strerror}): give another folder."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"trainer.default_root_dir = {str(root)!r}: another fit is writing it. Wait for it, "
                "or give another folder."
            ) from None
        except OSError:  # a file system without locks
            pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Unlock; remove the folder that a run made which failed before its first step: loggers write at once."""
        if self._lock is not None:
            os.close(self._lock)
        if not self._created or not isinstance(error, Exception):
            return
        root, *parents = self._created
        if not any(root.glob("checkpoints/*")) and not (root / "metrics.csv").exists():
            shutil.rmtree(root, ignore_errors=True)
            for parent in parents:
                with suppress(OSError):
                    parent.rmdir()

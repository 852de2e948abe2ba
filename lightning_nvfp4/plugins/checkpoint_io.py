"""Checkpoints that are either whole or not there.

The stock implementation writes to the system's temporary folder and moves the file, which across file systems is a
plain copy over the old checkpoint. Here the new file is written beside the target, flushed to the disk, and renamed
over it: a crash, a kill or a full disk at any moment leaves the old checkpoint or the new one.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import socket
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH

from lightning_nvfp4.errors import UserError

_SUFFIX = ".tmp"
# Exceptions of torch.load on a file that is no checkpoint or not all of one.
_BROKEN = (EOFError, RuntimeError, KeyError, AttributeError, zipfile.BadZipFile, OSError, ValueError)


class AtomicFileMixin:
    """Atomic saving and checked loading of local checkpoint files, over a stock `TorchCheckpointIO`.

    Put it before the checkpoint class of the tree in use: `AtomicCheckpointIO` does so for `lightning`; for
    `pytorch_lightning` write `class IO(AtomicFileMixin, lightning_fabric.plugins.TorchCheckpointIO)`. URLs of remote
    file systems go to the stock class, whose stores replace objects atomically.

    Args:
        verify: compare every record's checksum at load (about a second for two GB); catches flipped bits, which
            torch.load takes for weights. A file that was cut short is refused in any case.
    """

    def __init__(self, verify: bool = True) -> None:
        super().__init__()
        self.verify = verify

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`, leaving what is there untouched until the new file is safely on the disk.

        Raises:
            UserError: the file cannot be written (disk full, no permission); the previous checkpoint is whole and no
                temporary is left.
        """
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
            return
        target = _local(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(target)
            write_atomically(target, lambda file: torch.save(checkpoint, file))
        except OSError as error:
            raise _cannot_write(target, error) from error

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`; only tensors and plain containers, unless `weights_only` is False.

        Raises:
            FileNotFoundError: nothing is there.
            UserError: the file is cut short, damaged, or holds other objects.
        """
        weights_only = True if weights_only is None else weights_only
        if not _is_local_file_protocol(path):
            return super().load_checkpoint(path, map_location, weights_only)  # type: ignore[misc]
        source = _local(path)
        if not source.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {source}")
        try:
            _verify_archive(source, checksums=self.verify)
            checkpoint = torch.load(source, map_location=map_location, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if not weights_only:
                raise _broken(source, error) from error
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise UserError(
                f"{source} holds objects other than tensors and plain containers ({named[1] if named else 'unnamed'}), "
                "and loading those can execute code. If you trust the file, load it with weights_only=False."
            ) from error
        except _BROKEN as error:
            raise _broken(source, error) from error
        if not isinstance(checkpoint, dict):
            raise UserError(f"{source} holds a {type(checkpoint).__name__}, no Lightning checkpoint: check the path.")
        return checkpoint


class AtomicCheckpointIO(AtomicFileMixin, TorchCheckpointIO):
    """`Trainer(plugins=[AtomicCheckpointIO()])` and `Fabric(plugins=[...])`: see `AtomicFileMixin`."""


def write_atomically(target: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Call `write` on a temporary beside `target`, flush it to the disk and rename it over `target`.

    Raises:
        OSError: as the file system gave it, also where `write` wrapped it in another exception; `target` is as it was
            and the temporary is gone.
    """
    temporary = target.with_name(f"{_prefix(target)}{os.getpid()}{_SUFFIX}")
    recorder = _ErrorRecorder()
    try:
        with open(temporary, "wb") as raw:
            try:
                write(recorder.wrap(raw))
            except Exception as error:
                raise recorder.error or error from error
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, target)
        _fsync_folder(target.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


class _ErrorRecorder:
    """Keeps the OSError of a failing write: torch.save's archive writer reports only that some write failed."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def wrap(self, file: IO[bytes]) -> IO[bytes]:
        write = file.write

        def recorded(data: Any) -> int:
            try:
                return write(data)
            except OSError as error:
                self.error = self.error or error
                raise

        file.write = recorded  # type: ignore[method-assign]
        return file


def _local(path: _PATH) -> Path:
    return Path(str(path).removeprefix("file://"))


def _prefix(target: Path) -> str:
    return f".{target.name}.{socket.gethostname()}."


def _remove_leftovers(target: Path) -> None:
    """Delete the temporaries of `target` that processes of this machine left behind when they were killed."""
    prefix = _prefix(target)
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(prefix).removesuffix(_SUFFIX)
        if path.name == f"{prefix}{pid}{_SUFFIX}" and pid.isdecimal() and not _alive(int(pid)):
            with suppress(OSError):
                path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _fsync_folder(folder: Path) -> None:
    """Make the rename itself durable; some network file systems have no such call and need none."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verify_archive(path: Path, checksums: bool) -> None:
    if not zipfile.is_zipfile(path):
        raise EOFError("it does not end as a checkpoint does")
    if not checksums:
        return
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise zipfile.BadZipFile(f"record {bad} does not match its checksum")


def _broken(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} ({path.stat().st_size} bytes) is not a whole checkpoint: {error}. It was cut short or damaged: "
        "delete it and continue from an earlier checkpoint in the same folder, or copy it again from its source."
    )


def _cannot_write(path: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            error.strerror = f"{error.strerror}, {free / 2**20:.0f} MiB free"
    kept = "The checkpoint that was there is unchanged" if path.exists() else "No file was left behind"
    return UserError(
        f"The checkpoint {path} cannot be written: {error.strerror or error}. {kept}. "
        "Free space or choose another default_root_dir, then continue with --ckpt_path."
    )

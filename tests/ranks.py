"""Run a function on several processes that share a group, as a launcher would start them."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

# A fork has everything imported. Where CUDA may be in use, or Python warns of forks, a server starts the ranks.
_FORK = not torch.cuda.is_available() and sys.version_info < (3, 12)
_CONTEXT: Any = multiprocessing.get_context("fork" if _FORK else "forkserver")


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, group: str | None = "gloo", limit: float = 60
) -> list[Any]:
    """Return what ``function(rank, *arguments)`` returns on each rank.

    Args:
        function: of a test module's top level.
        size: number of processes.
        arguments: anything that torch.save takes.
        group: backend of a group to start first; with ``None`` only the environment of a launcher is set.
        limit: seconds after which the ranks are killed.

    Raises:
        RuntimeError: a rank failed, with the traceback of each that did.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, pipes = [], []
    for rank in range(size):
        ours, theirs = _CONTEXT.Pipe()
        where = (function.__code__.co_filename, function.__name__, _packed(arguments))
        rank_process = _CONTEXT.Process(target=_run, args=(theirs, rank, size, port, group, where), daemon=True)
        rank_process.start()
        theirs.close()
        ranks.append(rank_process)
        pipes.append(ours)
    results, failures = [], []
    end = time.monotonic() + limit
    for rank, (process, pipe) in enumerate(zip(ranks, pipes, strict=True)):
        try:
            done = pipe.poll(max(0, end - time.monotonic()))
            ok, value = pipe.recv() if done else (False, f"no answer within {limit} s")
        except EOFError:
            process.join(5)
            ok, value = False, f"ended with status {process.exitcode}"
        results.append(torch.load(io.BytesIO(value), weights_only=False) if ok else None)
        if not ok:
            failures.append(f"rank {rank}: {value}")
    for process in ranks:
        process.join(1)
        process.kill()
    if failures:
        raise RuntimeError("\n".join(failures))
    return results


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _run(pipe: Connection, rank: int, size: int, port: int, group: str | None, where: tuple[str, str, bytes]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", NODE_RANK="0")
    torch.set_num_threads(1)
    rank_zero_only.rank = rank  # read from the environment at import, which a fork has behind it
    path, name, arguments = where
    try:
        spec = importlib.util.spec_from_file_location(f"rank_{os.path.basename(path)[:-3]}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if group is not None:
            torch.distributed.init_process_group(group, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        result = getattr(module, name)(rank, *torch.load(io.BytesIO(arguments), weights_only=False))
        pipe.send((True, _packed(result)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

"""Whether a completion's answer equals a number or expression, judged by math-verify in a process of its own."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_nvfp4.errors import UserError

_WORKER = Path(__file__).with_name("math_worker.py")
_START_SECONDS = 120.0  # sympy's import on a loaded machine
_LOCK = threading.Lock()
_process: subprocess.Popen[str] | None = None


def equal_answers(pairs: Sequence[tuple[str, str]], timeout: float) -> list[bool]:
    """Return for each (text, right answer) whether the last expression of the text equals the answer.

    A pair on which math-verify spends more than `timeout` seconds is wrong.

    Raises:
        UserError: math-verify is not installed.
    """
    with _LOCK:
        verdicts = _ask(pairs, _START_SECONDS + timeout * len(pairs) if _process is None else timeout * len(pairs))
        if verdicts is None and len(pairs) > 1:  # one of them hangs: find out which
            singly = [_ask([pair], _START_SECONDS if _process is None else timeout) for pair in pairs]
            return [bool(verdict and verdict[0]) for verdict in singly]
        return verdicts or [False] * len(pairs)


def _ask(pairs: Sequence[tuple[str, str]], timeout: float) -> list[bool] | None:
    """The worker's verdicts; None where it took too long or died, and is gone."""
    global _process
    if _process is None:
        _process = _start()
    process = _process
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(pairs) + "\n")
        process.stdin.flush()
        line = _line(process, timeout)
    except BrokenPipeError:
        line = ""
    if not line:
        _stop()
        return None
    return json.loads(line)


def _start() -> subprocess.Popen[str]:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "the reward gsm8k compares answers with math-verify, which is not installed: "
            "pip install 'lightning-nvfp4[rl]'."
        )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        env=environment,
    )
    if _line(process, _START_SECONDS).strip() != "ready":
        process.kill()
        raise RuntimeError("the process that compares answers did not start: check that `import math_verify` works")
    return process


def _line(process: subprocess.Popen[str], timeout: float) -> str:
    """One line of output, empty when the time is up or the process has ended."""
    assert process.stdout is not None
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            return process.stdout.readline()
    return ""


@atexit.register
def _stop() -> None:
    global _process
    if _process is not None:
        _process.kill()
        _process.wait()
        for stream in (_process.stdin, _process.stdout):
            if stream is not None:
                stream.close()
        _process = None


def _forget() -> None:
    """A fork must not read its parent's answers."""
    global _process, _LOCK
    _process, _LOCK = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

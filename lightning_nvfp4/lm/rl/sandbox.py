"""Run model-written Python where it can do no harm, and say whether it passes its tests.

Each program runs in a fork of a fresh interpreter with namespaces of its own (user, network, pid, mount, IPC), an
unprivileged uid, no capability, resource limits and an empty directory; `sandbox_worker.py` describes the layout.
It sees no environment, no file but the standard library, no network, no other process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError

MEMORY_BYTES = 512 << 20
FILE_BYTES = 16 << 20
PROCESSES = 16  # processes and threads of one worker, the sandbox's own four included
START_SECONDS = 60.0  # a loaded machine may take long to start an interpreter

_WORKER = Path(__file__).with_name("sandbox_worker.py")


@dataclass(frozen=True)
class Program:
    """One program and its tests.

    Attributes:
        source: Python text that defines the functions.
        tests: Python text run after it; sees the program's names. Any exception is a failure.
        entry_point: function under test. When given, results whose class overrides comparison are refused, and a
            function ``check`` defined by `tests` is called with it (HumanEval's form).
    """

    source: str
    tests: str = ""
    entry_point: str | None = None


@dataclass(frozen=True)
class SandboxResult:
    """Verdict on one program.

    Attributes:
        passed: the tests ran to their end without an exception, within the limits.
        reason: "passed", the exception, "time limit of ...", or "ended before its tests were through".
        seconds: wall time.
        isolated: whether it ran in namespaces of its own.
    """

    passed: bool
    reason: str
    seconds: float
    isolated: bool


class _Refused(Exception):
    """The worker could not shut itself in."""


def run_python(
    source: str,
    *,
    tests: str = "",
    entry_point: str | None = None,
    timeout: float = 5.0,
    memory_bytes: int = MEMORY_BYTES,
    allow_unsafe: bool = False,
) -> SandboxResult:
    """Run one program; see `run_many`."""
    program = Program(source, tests, entry_point)
    return run_many([program], timeout=timeout, memory_bytes=memory_bytes, allow_unsafe=allow_unsafe)[0]


def run_many(
    programs: Sequence[str | Program],
    *,
    timeout: float = 5.0,
    memory_bytes: int = MEMORY_BYTES,
    workers: int = 1,
    packages: Sequence[str] = (),
    allow_unsafe: bool = False,
) -> list[SandboxResult]:
    """Run programs one after the other in `workers` sandboxed interpreters, which fork for each program.

    Args:
        programs: Python texts or `Program`s.
        timeout: wall seconds for each program.
        memory_bytes: address space of each process of a program.
        workers: interpreters side by side.
        packages: installed packages that programs or tests may import besides the standard library.
        allow_unsafe: where namespaces cannot be had, run with limits alone instead of refusing.

    Returns:
        One result for each program, in order.

    Raises:
        UserError: this machine cannot isolate and `allow_unsafe` is not set; a limit that is not positive; a package
            that is not installed.
    """
    if not timeout > 0 or memory_bytes < 64 << 20 or workers < 1:
        raise UserError(
            f"sandbox limits timeout={timeout}, memory_bytes={memory_bytes}, workers={workers}: need a positive time, "
            "at least 64 MiB and one worker."
        )
    jobs = [
        {"source": p.source, "tests": p.tests, "entry_point": p.entry_point, "timeout": timeout}
        for p in (Program(p) if isinstance(p, str) else p for p in programs)
    ]
    if not jobs:
        return []
    options = {
        "memory_bytes": memory_bytes,
        "file_bytes": FILE_BYTES,
        "processes": PROCESSES,
        "imports": list(packages),
        "packages": [folder for name in packages for folder in _package_folders(name)],
    }
    lanes = [jobs[lane::workers] for lane in range(min(workers, len(jobs)))]
    with ThreadPoolExecutor(len(lanes)) as pool:
        parts = list(pool.map(lambda lane: _run_lane(lane, options, allow_unsafe), lanes))
    results: list[SandboxResult] = [parts[i % len(lanes)][i // len(lanes)] for i in range(len(jobs))]
    return results


def _package_folders(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"sandbox package {name!r} is not installed: install it, or leave out the task that needs it.")
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    # Wheels keep their shared objects in a folder beside the package.
    return [str(path) for path in (folder, folder.with_name(f"{folder.name}.libs")) if path.is_dir()]


def _run_lane(jobs: list[dict[str, Any]], options: dict[str, Any], allow_unsafe: bool) -> list[SandboxResult]:
    try:
        return _run_worker(jobs, options, isolated=True)
    except _Refused as refusal:
        if not allow_unsafe:
            raise UserError(
                f"model-written code was not run: this machine gives no isolated namespaces ({refusal}). Allow user "
                "namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0; in a container "
                "start it with --privileged or --cap-add SYS_ADMIN --security-opt seccomp=unconfined), or pass "
                "allow_unsafe=True to run it with resource limits alone."
            ) from refusal
        return _run_worker(jobs, options, isolated=False)


def _run_worker(jobs: list[dict[str, Any]], options: dict[str, Any], *, isolated: bool) -> list[SandboxResult]:
    root = tempfile.mkdtemp(prefix="nvfp4-sandbox-")
    options = {**options, "root": root}
    if not isolated:
        os.chmod(root, 0o711)  # programs under another uid pass through to their own directories
    command = [sys.executable, "-s", "-S", "-P", "-B", str(_WORKER)]
    # The seed makes set order, and so a verdict that depends on it, the same in every run.
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=root,
        start_new_session=True,
        close_fds=True,
    )
    try:
        request = json.dumps({"options": options, "isolated": isolated, "jobs": jobs}).encode()
        out, err = worker.communicate(request, timeout=START_SECONDS + sum(job["timeout"] + 1.0 for job in jobs))
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the sandbox did not answer within {error.timeout:g} s") from error
    finally:
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        worker.wait()
        for stream in (worker.stdin, worker.stdout, worker.stderr):
            if stream is not None:
                stream.close()
        shutil.rmtree(root, ignore_errors=True)
    events = [json.loads(line) for line in out.decode().splitlines()]
    if not events:
        raise RuntimeError(f"the sandbox did not start: {err.decode(errors='replace')[-500:]}")
    if "refused" in events[0]:
        raise _Refused(events[0]["refused"])
    faults = [event["reason"] for event in events if event.get("fault")]
    if faults or len(events) != len(jobs) + 1:
        raise RuntimeError(f"the sandbox failed: {faults[:1] or err.decode(errors='replace')[-500:]}")
    return [SandboxResult(e["passed"], e["reason"], e["seconds"], isolated) for e in events[1:]]

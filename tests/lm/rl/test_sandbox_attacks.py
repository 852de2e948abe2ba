"""What a hostile program does is contained and reported, and the next program runs as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lightning_nvfp4.lm.rl.sandbox import Program, SandboxResult, run_many

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
RIGHT = Program("def square(x):\n    return x * x\n", CHECK, "square")


pytestmark = pytest.mark.usefixtures("isolation")


def attack(source: str, tests: str = "", entry_point: str | None = None, timeout: float = 3.0) -> SandboxResult:
    """Run `source`, then a right program in the same worker, which must pass; return what is said of the first."""
    start = time.monotonic()
    result, after = run_many([Program(source, tests, entry_point), RIGHT], timeout=timeout)
    assert after.passed, after.reason
    assert result.isolated
    assert time.monotonic() - start < 3 * timeout + 30
    return result


# Ends in a failure that names what stopped it.
CONTAINED = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()\n", "(BlockingIOError|MemoryError|time limit)"),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()\n",
        "(RuntimeError|MemoryError)",
    ),
    "10 GiB allocation": ("x = bytearray(10 << 30)\n", "MemoryError"),
    "10 GiB in pieces": ("x = []\nwhile True:\n    x.append(bytearray(1 << 24))\n", "MemoryError"),
    "10 GiB mapped": ("import mmap\nmmap.mmap(-1, 10 << 30)\n", "(OSError|MemoryError)"),
    "infinite loop": ("while True:\n    pass\n", "time limit"),
    "infinite loop that swallows everything": (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass\n",
        "time limit",
    ),
    "reading a file outside": ("open('/etc/passwd').read()\n", "FileNotFoundError"),
    "reading through a symbolic link": (
        "import os\nos.symlink('/etc/passwd', 'link')\nopen('link').read()\n",
        "FileNotFoundError",
    ),
    "reading through many parents": ("open('../' * 40 + 'etc/passwd').read()\n", "FileNotFoundError"),
    "hard link to a file of the library": ("import os\nos.link(os.__file__, 'os.py')\n", "(OSError|PermissionError)"),
    "writing through a symbolic link": (
        "import os\nos.symlink(os.__file__, 'link')\nopen('link', 'a')\n",
        "(OSError|PermissionError)",
    ),
    "proc of other processes": ("open('/proc/1/environ').read()\n", "FileNotFoundError"),
    "mounting proc": (
        "import ctypes, os\nos.mkdir('p')\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.mount(b'proc', b'p', b'proc', 0, None):\n    raise OSError(ctypes.get_errno(), 'refused')\n",
        "PermissionError",
    ),
    "opening a socket": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\n", "OSError"),
    "abstract unix socket": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0/tmp/.X11-unix/X0')\n",
        "ConnectionRefusedError",
    ),
    "raw socket": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\n", "PermissionError"),
    "killing the parent": (
        "import os, signal\nfor pid in (os.getppid(), 1, 2, 3, -1):\n    try:\n"
        "        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\nraise ValueError('alive')\n",
        "(ValueError: alive|ended before)",
    ),
    "tracing the parent": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.ptrace(16, 2, 0, 0):\n    raise OSError(ctypes.get_errno(), 'refused')\n",
        "(PermissionError|ProcessLookupError)",
    ),
    "writing 1 GiB": (
        "with open('big', 'wb') as f:\n    for _ in range(1024):\n        f.write(bytes(1 << 20))\n",
        "OSError",
    ),
    "writing 1 GiB in many files": (
        "for i in range(1024):\n    with open(f'f{i}', 'wb') as f:\n        f.write(bytes(1 << 20))\n",
        "OSError",
    ),
    "1 GiB file of holes": ("open('big', 'wb').truncate(1 << 30)\n", "OSError"),
    "a million files": ("for i in range(10 ** 6):\n    open(f'f{i}', 'wb').close()\n", "OSError"),
    "shared memory": ("open('/dev/shm/x', 'wb')\n", "(FileNotFoundError|OSError)"),
    "setuid": ("import os\nos.setuid(0)\n", "(PermissionError|OSError)"),
    "executing a set-uid program": ("import os\nos.execv('/usr/bin/su', ['su'])\n", "FileNotFoundError"),
    "raising a limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n",
        "(ValueError|PermissionError)",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f():\n    return f()\nf()\n",
        "(RecursionError|MemoryError|ended before|time limit)",
    ),
    "deep recursion in C": (
        "x = []\nfor _ in range(10 ** 6):\n    x = [x]\nrepr(x)\n",
        "(RecursionError|ended before)",
    ),
    "every signal ignored": (
        "import signal\nfor s in range(1, 65):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass\n",
        "time limit",
    ),
    "hung at interpreter exit": (
        "import atexit, sys, time\natexit.register(time.sleep, 60)\nsys.exit(0)\n",
        "SystemExit",
    ),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)\n", "ended before"),
}


@pytest.mark.parametrize("name", CONTAINED)
def test_contained_and_reported(name: str) -> None:
    source, reason = CONTAINED[name]
    result = attack(source)
    assert not result.passed
    assert re.match(reason, result.reason), result.reason


def test_the_environment_and_the_descriptors_of_the_caller_stay_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    with secret.open() as stream:
        os.set_inheritable(stream.fileno(), True)
        result = attack(
            "import os\nassert 's3cret' not in str(os.environ)\nfound = ''\n"
            "for fd in range(3, 64):\n    if fd in (20, 21):\n        continue\n    try:\n"
            "        found += os.pread(fd, 64, 0).decode()\n    except OSError:\n        pass\n"
            "assert not found, found\n"
        )
    assert result.passed, result.reason


def test_a_gigabyte_of_output_is_discarded() -> None:
    source = (
        "import os\nblock = b'x' * (1 << 20)\nfor _ in range(1024):\n    os.write(1, block)\n    os.write(2, block)\n"
    )
    assert attack(source, timeout=20.0).passed


def test_a_daemon_does_not_outlive_its_program(tmp_path: Path) -> None:
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    source = (
        "import ctypes, os, signal, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0:\n"
        f"        ctypes.CDLL(None).prctl(15, b'{mark[-15:]}', 0, 0, 0)\n"
        "        while True:\n            time.sleep(1)\n    os._exit(0)\n"
        "time.sleep(0.3)\n"
    )
    assert attack(source).passed
    names = []
    for entry in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.append(entry.read_text().strip())
        except OSError:
            continue
    assert mark[-15:] not in names


def test_ending_the_worker_does_not_end_the_caller() -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        attack("import os, signal\nos.killpg(0, signal.SIGKILL)\n")
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


# None of these computes the square; none may pass.
FORGED = {
    "sys.exit(0) before the tests": "import sys\nsys.exit(0)\n",
    "sys.exit(0) inside": "import sys\ndef square(x):\n    sys.exit(0)\n",
    "os._exit(0) before the tests": "import os\nos._exit(0)\n",
    "os._exit(0) inside": "import os\ndef square(x):\n    os._exit(0)\n",
    "exec of a program that ends well": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])\n",
    "fork whose child ends well": "import os\ndef square(x):\n    if os.fork() == 0:\n"
    "        return x * x\n    os._exit(0)\n",
    "assertions that cannot fail": "import builtins\nclass Quiet(Exception):\n    pass\n"
    "builtins.AssertionError = Quiet\ndef square(x):\n    return 0\n",
    "tests compiled without assertions": "import builtins\nold = builtins.compile\n"
    "builtins.compile = lambda s, f, m, *a, **k: old(s, f, m, optimize=2)\ndef square(x):\n    return 0\n",
    "equal to everything": "class Yes:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
    "def square(x):\n    return Yes()\n",
    "equal to everything, by metaclass": "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
    "class Yes(metaclass=M):\n    pass\ndef square(x):\n    return Yes\n",
    "equal to everything, by a standard class": "from fractions import Fraction\nFraction.__eq__ = lambda s, o: True\n"
    "def square(x):\n    return Fraction(1, 3)\n",
    "equal to everything, in a container": "class Yes(int):\n    __eq__ = lambda s, o: True\n"
    "def square(x):\n    return [Yes()][0]\n",
    "equal to everything, patched after the check": "import collections\nclass D(collections.UserList):\n    pass\n"
    "collections.UserList.__eq__ = lambda s, o: True\ndef square(x):\n    return D()\n",
    "harness without a list of operators": "import sys\ng = sys._getframe(1).f_globals\n"
    "g['ANSWERING'] = frozenset()\ng['operators'] = lambda k: {}\nclass Yes:\n    __eq__ = lambda s, o: True\n"
    "def square(x):\n    return Yes()\n",
    "equal to everything, with a forged hash": "from fractions import Fraction\nclass M(type):\n"
    "    __hash__ = lambda s: type.__hash__(Fraction)\n    __eq__ = lambda s, o: True\n"
    "class Yes(metaclass=M):\n    __eq__ = lambda s, o: True\ndef square(x):\n    return Yes()\n",
    "hung finalizer": "class D:\n    def __del__(self):\n        while True:\n            pass\n"
    "def square(x):\n    D()\n    return x * x\n",
}


@pytest.mark.parametrize("name", FORGED)
def test_does_not_pass(name: str) -> None:
    result = attack(FORGED[name], CHECK, "square")
    assert not result.passed
    assert result.reason != "passed"


def test_a_patched_test_library_does_not_reach_the_tests() -> None:
    source = (
        "import unittest, unittest.case\n"
        "unittest.TestCase.assertEqual = unittest.case.TestCase.assertEqual = lambda *a: None\n"
        "def square(x):\n    return 0\n"
    )
    tests = "import unittest\nunittest.TestCase().assertEqual(square(2), 4)\n"
    assert attack(source, tests).reason.startswith("AssertionError")


def test_objects_that_hang_when_they_are_destroyed_do_not_hold_up_the_verdict() -> None:
    source = "class D:\n    def __del__(self):\n        while True:\n            pass\nkept = D()\n"
    result = attack(source + RIGHT.source, CHECK, "square")
    assert result.passed and result.seconds < 2, "the process ends without running finalizers"

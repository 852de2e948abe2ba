"""Programs that try to get out of the sandbox, or to pass without passing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.rl import sandbox
from lightning_nvfp4.lm.rl.sandbox import Program, run_many, run_python

pytestmark = pytest.mark.usefixtures("isolation")


CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
RIGHT = "def square(x):\n    return x * x\n"

# A program that reports by failing or passing its own assertion: passing means that the sandbox held.
HELD = {
    "network": """
import socket
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except OSError as e:
    assert e.errno == 101, e  # unreachable, not refused: there is no network, not even to this machine
else:
    raise AssertionError
""",
    "no interfaces but lo": "import socket; assert [n for _, n in socket.if_nameindex()] == ['lo']",
    "environment": """
import os
assert set(os.environ) <= {'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}, os.environ
""",
    "unprivileged": "import os; assert os.getuid() == os.geteuid() == 65534",
    "no way back to root": """
import os
for call in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.chroot('/')):
    try:
        call()
    except OSError:
        continue
    raise AssertionError
""",
    "no new user namespace": """
import ctypes
assert ctypes.CDLL(None).unshare(0x10000000) == -1
""",
    "no mounts": """
import ctypes
assert ctypes.CDLL(None).mount(b"tmpfs", b"/box", b"tmpfs", 0, b"") == -1
""",
    "alone in its pid namespace": """
import os
assert os.getpid() == 1 and os.getppid() == 0
try:
    os.kill(-1, 9)  # every process it can see
except ProcessLookupError:
    pass
else:
    raise AssertionError
""",
    "no host files": """
import os
assert not any(os.path.exists(p) for p in ('/etc', '/proc', '/home', '/root/.bashrc', '/tmp', '/dev', '/sys'))
""",
    "writes only in its directory": """
import os
open('mine', 'w').write('x')
assert os.getcwd() == '/box' and os.listdir('.') == ['mine']
for path in ('/x', '/usr/lib/x', os.path.dirname(os.__file__) + '/x'):
    try:
        open(path, 'w')
    except OSError:
        continue
    raise AssertionError(path)
""",
    "no inherited descriptors": """
import os
open_ones = []
for fd in range(3, 64):
    try:
        os.fstat(fd)
        open_ones.append(fd)
    except OSError:
        pass
assert len(open_ones) == 2, open_ones  # the harness's own pipes
assert os.read(0, 1) == b''
""",
    "file size": """
try:
    with open('big', 'wb') as f:
        for _ in range(64):
            f.write(bytes(1 << 20))
except OSError:
    pass
else:
    raise AssertionError
""",
    "memory": """
try:
    blocks = [bytes(1 << 28) for _ in range(8)]
except MemoryError:
    pass
else:
    raise AssertionError
""",
    "fork bomb": """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        children += 1
except OSError:
    pass
assert children < 16, children
""",
}


@pytest.mark.parametrize("name", HELD)
def test_holds(name: str) -> None:
    result = run_python(HELD[name])
    assert result.passed, result.reason
    assert result.isolated


FORGED = {
    "os._exit": "import os\ndef square(x):\n    os._exit(0)\n",
    "sys.exit": "import sys\ndef square(x):\n    sys.exit(0)\n",
    "exit before the tests": RIGHT + "raise SystemExit(0)\n",
    "exit handler": "import atexit, os\natexit.register(print, 'passed')\natexit.register(os._exit, 0)\n",
    "print": "print('passed', flush=True)\ndef square(x):\n    print('{\"passed\": true}')\n",
    "own check": "def check(candidate):\n    pass\ndef square(x):\n    return 0\n",
    "equal to all": "class Yes:\n    def __eq__(self, o):\n        return True\ndef square(x):\n    return Yes()\n",
    "equal to all, inside": "class Yes(int):\n    def __eq__(self, o):\n        return True\n"
    "def square(x):\n    return Yes(x * x + 1)\n",
    "patched builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\n"
    "builtins.AssertionError = SystemExit\nbuiltins.exec = lambda *a: None\nbuiltins.compile = lambda *a: ''\n"
    "def square(x):\n    return 0\n",
    "patched harness": "import sys\nf = sys._getframe(1)\nf.f_globals['reject_own_answers'] = lambda *a: None\n"
    "f.f_globals['judged'] = lambda *a: (lambda *a: 4)\nf.f_locals['verdict'] = b'x'\ndef square(x):\n    return 0\n",
    "writes to every descriptor": "import os\ndef square(x):\n    for fd in range(64):\n        try:\n"
    "            os.write(fd, b'passed')\n        except OSError:\n            pass\n    os._exit(0)\n",
    "trace": "import sys\ndef t(f, e, a):\n    return t\nsys.settrace(t)\ndef square(x):\n    return 0\n",
    "signal": "import os, signal\ndef square(x):\n    os.kill(os.getpid(), signal.SIGSEGV)\n    os.abort()\n",
    "deep recursion": "def square(x):\n    return square(x)\n",
    "syntax": "def square(x)\n    return x * x\n",
    "missing": "def cube(x):\n    return x\n",
    "null byte": "def square(x):\n    return '\0'\n",
}


@pytest.mark.parametrize("name", FORGED)
def test_does_not_pass(name: str) -> None:
    program = Program(FORGED[name], CHECK, "square")
    result = run_many([program, Program(RIGHT, CHECK, "square")], timeout=2.0)
    assert not result[0].passed
    assert result[0].reason != "passed"
    assert result[1].passed, "the program after it runs as if nothing had happened"


def test_patched_module_does_not_reach_the_tests() -> None:
    source = "import math\nmath.isclose = lambda *a, **k: True\ndef half(x):\n    return 0.0\n"
    assert not run_python(source, tests="import math\nassert math.isclose(half(3), 1.5)\n").passed


def test_plain_results_of_program_classes_pass() -> None:
    source = (
        "from collections import Counter, namedtuple\nfrom fractions import Fraction\nP = namedtuple('P', 'x y')\n"
        "def f(x):\n    return [P(x, Fraction(1, 2)), Counter('aa'), {x: (1.5, None)}]\n"
    )
    tests = "def check(c):\n    r = c(1)\n    assert r[0].x == 1 and r[1]['a'] == 2 and r[2] == {1: (1.5, None)}\n"
    result = run_python(source, tests=tests, entry_point="f")
    assert result.passed, result.reason


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)", "input(); 10 ** 10 ** 10"])
def test_time_limit(body: str) -> None:
    start = time.monotonic()
    result = run_python(body, timeout=0.5)
    assert not result.passed
    assert time.monotonic() - start < 10


def test_huge_output_is_discarded() -> None:
    assert run_python("for _ in range(200):\n    print('x' * 1_000_000)\n").passed


def test_a_long_message_is_cut() -> None:
    assert len(run_python("raise ValueError('x' * 10 ** 6)").reason) <= 400


def test_daemons_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "worker_of_this_test.py"  # forks keep the command line, so every descendant bears this name
    worker.write_text(Path(sandbox.__file__).with_name("sandbox_worker.py").read_text())
    monkeypatch.setattr(sandbox, "_WORKER", worker)
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(20)
    os._exit(0)
"""
    assert run_python(source).passed
    left = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(worker).encode() in (entry / "cmdline").read_bytes():
                left.append(entry.name)
        except OSError:
            continue
    assert left == []


def test_programs_do_not_see_each_other() -> None:
    spoil = "import os, math, sys\nopen('left', 'w').write('x')\nmath.pi = 3\nsys.modules['left'] = math\n"
    look = "import os, math, sys\nassert os.listdir('.') == [] and math.pi > 3.1 and 'left' not in sys.modules\n"
    assert [r.passed for r in run_many([spoil, look, spoil, look])] == [True] * 4


def test_verdicts_keep_their_order_over_workers() -> None:
    programs = [f"assert {i} % 3" for i in range(10)]
    expected = [bool(i % 3) for i in range(10)]
    assert [r.passed for r in run_many(programs, workers=2)] == expected
    assert [r.passed for r in run_many(programs, workers=1)] == expected
    assert run_many([]) == []


def test_set_order_and_random_are_the_same_in_every_run() -> None:
    source = "import random\nassert False, (list({'a', 'b', 'c', 'd', 'e'}), random.random())\n"
    assert run_python(source).reason == run_python(source).reason


def test_packages_are_there_only_when_asked_for() -> None:
    source = "import numpy as np\nassert np.linalg.solve(np.eye(3) * 2, np.ones(3)).sum() == 1.5\n"
    assert run_many([source])[0].reason.startswith("ModuleNotFoundError")
    assert run_many([source, "import yaml"], packages=["numpy"])[0].reason == "passed"
    assert not run_many(["import torch"], packages=["numpy"])[0].passed
    with pytest.raises(UserError, match="'no_such_package' is not installed"):
        run_many([source], packages=["no_such_package"])


def test_refuses_where_isolation_is_impossible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = tmp_path / "sandbox_worker.py"
    text = Path(sandbox.__file__).with_name("sandbox_worker.py").read_text()
    worker.write_text(text.replace('call("unshare", USER', 'raise OSError("not here")  # call("unshare", USER'))
    monkeypatch.setattr(sandbox, "_WORKER", worker)
    with pytest.raises(UserError, match="not here.*allow_unsafe"):
        run_python("pass")
    # With limits alone the verdicts are the same.
    programs = [Program(RIGHT, CHECK, "square"), Program(FORGED["os._exit"], CHECK, "square"), "while True: pass"]
    results = run_many(programs, timeout=1.0, allow_unsafe=True)
    assert [r.passed for r in results] == [True, False, False]
    assert not any(r.isolated for r in results)


@pytest.mark.parametrize("limits", [{"timeout": 0.0}, {"memory_bytes": 1}, {"workers": 0}])
def test_limits_are_checked(limits: dict) -> None:
    with pytest.raises(UserError, match="sandbox limits"):
        run_many(["pass"], **limits)


def test_unprivileged_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("runs as an unprivileged user already")
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "from lightning_nvfp4.lm.rl import sandbox\n"
        "print(sandbox.run_python('import os; assert os.getuid() == 65534'))"
    )
    root = str(Path(__file__).parents[3])
    python = os.path.realpath(sys.executable)
    if not _readable_by_others(python) or not _readable_by_others(root):
        pytest.skip("the interpreter or the checkout is closed to other users")
    done = subprocess.run([python, "-c", code, root], capture_output=True, text=True)
    assert "passed=True" in done.stdout, done.stdout + done.stderr


def _readable_by_others(path: str) -> bool:
    return all(p.stat().st_mode & 0o005 == 0o005 for p in (Path(path), *Path(path).parents))

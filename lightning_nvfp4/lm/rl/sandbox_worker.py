"""The sandbox's worker: a program of its own, standard library only, started by `sandbox.py` in a fresh interpreter.

It shuts itself in once and then forks for each program, so that a program costs milliseconds, not an interpreter start:

    outer       writes the user-namespace map of its child, waits
      guard     new user, network, pid, mount, IPC and UTS namespaces; an unprivileged uid
        server  pid 1 of the pid namespace, root directory = a read-only tree with the standard library only
          cell  new pid, mount and IPC namespaces for each program; keeps the time, knows the token
            program   pid 1 of the cell, no capability, resource limits, an empty directory; its death ends its children

Protocol: the job list as one JSON object on standard input; one JSON line for each event on standard output, first
``{"ready": true}`` or ``{"refused": reason}``, then a result for each program.

A program passes only when the *harness* answers, after its tests ran, with a token that the cell drew after the fork:
the token is in no Python object while the program runs. An early exit, a forged print or a swallowed exception leaves
no token. Program and tests share one interpreter, so a program that knows this file could read the token's pipe
itself; that is outside what is defended here.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any

USER, NET, PID, MOUNT, IPC, UTS = 0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x08000000, 0x04000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_DUMPABLE = 1, 36, 38, 4
CAPSET = {"x86_64": 126, "aarch64": 91}  # system call numbers
NOBODY = 65534
TEXT_LIMIT = 300  # characters of a reason
BOX = "/box"

# Modules that programs use, imported once before the first fork.
PRELOAD = (
    "abc array base64 bisect calendar cmath collections collections.abc copy dataclasses datetime decimal enum "
    "fractions functools hashlib heapq itertools json math numbers operator random re statistics string struct "
    "textwrap time typing unicodedata"
).split()

# Modules that tests lean on: put back as they were before the tests run. Every one costs page copies in each fork.
RESTORED = ("builtins", "math", "cmath", "random", "re", "copy", "itertools", "functools", "collections", "operator")

# Operators by which an object could answer a test's comparison in its own favour.
ANSWERING = frozenset(
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
    "__rtruediv__ __mod__ __rmod__ __abs__ __round__ __bool__ __contains__ __getattr__ __getattribute__ __class__ "
    "__iter__ __len__ __getitem__ __instancecheck__".split()
)

# Imported anew by tests that use them: their classes can be changed from inside.
FORGOTTEN = ("unittest", "doctest")

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> None:
    """Call a function of libc and raise OSError where it fails."""
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount `source` of file system `kind` at `target`."""
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def bind_read_only(source: str, root: str) -> None:
    """Show the directory `source` under `root` at the same path, read-only."""
    target = root + source
    os.makedirs(target, exist_ok=True)
    mount(source, target, "none", BIND | REC)
    kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME)
    # The mount's own flags are kept, as an unprivileged user namespace must; statvfs and mount number these alike, but
    # relatime, which is the kernel's default.
    mount("none", target, "none", REMOUNT | BIND | RDONLY | kept)


def build_root(root: str, packages: list[str]) -> None:
    """Mount at `root` a tree with the standard library, the folders `packages`, shared objects and an empty box."""
    mount("none", "/", "none", REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.mkdir(root + BOX)
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            bind_read_only(path, root)
    library = os.path.realpath(os.path.dirname(os.__file__))
    for path in (library, *packages):
        if not os.path.isdir(root + path):
            bind_read_only(path, root)
    mount("none", root, "none", REMOUNT | RDONLY | NOSUID | NODEV)


def isolate(root: str, packages: list[str]) -> None:
    """Enter the namespaces; returns in the server process, every other process of the chain waits and exits."""
    privileged = os.geteuid() == 0
    outer_uid, outer_gid = (NOBODY, NOBODY) if privileged else (os.geteuid(), os.getegid())
    if privileged:
        os.setgroups([])
        call("unshare", MOUNT)
        build_root(root, packages)  # while paths like /root can still be entered
    to_outer, from_outer = os.pipe(), os.pipe()
    guard = os.fork()
    if guard:
        os.close(to_outer[1])
        os.read(to_outer[0], 1)
        try:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{NOBODY} {outer_uid} 1"),
                ("gid_map", f"{NOBODY} {outer_gid} 1"),
            ):
                with open(f"/proc/{guard}/{name}", "w") as stream:
                    stream.write(text)
            os.write(from_outer[1], b"1")
        except OSError:
            os.close(from_outer[1])  # the guard sees the end of its pipe and refuses
        os._exit(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]) & 0xFF)
    os.close(from_outer[1])
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("unshare", USER | NET | PID | MOUNT | IPC | UTS)
    os.write(to_outer[1], b"1")
    if os.read(from_outer[0], 1) != b"1":
        raise OSError("the user-namespace map could not be written")
    for descriptor in (*to_outer, from_outer[0]):
        os.close(descriptor)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # A change of uid makes a process undumpable, which hides its own /proc entries; nothing secret is held here yet.
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    if not privileged:
        build_root(root, packages)
    server = os.fork()
    if server:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) & 0xFF)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chroot(root)
    os.chdir(BOX)


def drop_capabilities() -> None:
    """Give up every capability, and the ways to gain one by executing a file."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    call("syscall", CAPSET[os.uname().machine], header, (ctypes.c_uint32 * 6)())


def limit(memory_bytes: int, file_bytes: int, processes: int, seconds: float) -> None:
    """Set the resource limits of the program and of all it starts."""
    cpu = int(seconds) + 1
    wanted = [
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, processes),
    ]
    for what, value in wanted:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def operators(kind: type) -> dict[str, Any]:
    """Return the operators among `ANSWERING` that the class itself defines."""
    content = type.__dict__["__dict__"].__get__(kind)
    return {name: content[name] for name in ANSWERING & content.keys()}


def known_operators() -> dict[int, dict[str, Any]]:
    """Return the operators of every Python class that a loaded module holds, by id: metaclasses can forge hashes."""
    kinds = {v for module in list(sys.modules.values()) for v in list(vars(module).values()) if isinstance(v, type)}
    return {id(kind): operators(kind) for kind in kinds if kind.__flags__ & (1 << 9)}


def reject_own_answers(value: Any, known: dict[int, dict[str, Any]], depth: int = 0) -> None:
    """Raise TypeError for an object whose operators that tests rely on are not those of `known`, so the program's."""
    kind = type(value)
    if kind.__flags__ & (1 << 9):  # a heap type: made by Python code
        bases = [base for base in type.__dict__["__mro__"].__get__(kind) if base.__flags__ & (1 << 9)]
        if id(kind) not in known and any(operators(base) for base in bases):
            raise TypeError(f"returned a {kind.__name__!s:.50} with operators of its own")
        if id(kind) in known and any(operators(base) != known[id(base)] for base in bases if id(base) in known):
            raise TypeError(f"changed the operators of {kind.__name__!s:.50}")
    elif depth < 4 and isinstance(value, (list, tuple, set, frozenset, dict)):
        for item in value:
            reject_own_answers(item, known, depth + 1)
        if isinstance(value, dict):
            for item in value.values():
                reject_own_answers(item, known, depth + 1)


def judged(function: Any, reject: Any, known: Any) -> Any:
    """Wrap the function under test: its results pass through `reject`."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        reject(result, known)
        return result

    return candidate


def run_program(
    job: dict[str, Any], pristine: dict[str, Any], known: dict[int, dict[str, Any]], token_fd: int, result_fd: int
) -> None:
    """Run one program and its tests, write the verdict and end the process.

    Whatever is needed after the program ran is bound to locals first: a program can rebind globals and attributes of
    modules, but not these. Modules are put back as they were before the tests run.
    """
    read, write, leave, execute, modules = os.read, os.write, os._exit, exec, sys.modules
    base, is_callable, reject, judge = BaseException, callable, reject_own_answers, judged
    clear_trace, clear_profile, module_dict = sys.settrace, sys.setprofile, vars
    harness = globals()
    own = dict(harness)
    verdict = b""
    try:
        import random

        random.seed(0)
        module = types.ModuleType("program")
        modules["program"] = modules["__main__"] = module
        execute(compile(job["source"], "<program>", "exec"), module.__dict__)
        clear_trace(None)
        clear_profile(None)
        harness.clear()
        harness.update(own)
        for name, (original, attributes) in pristine.items():
            modules[name] = original
            content = module_dict(original)
            content.clear()
            content.update(attributes)
        for name in [name for name in modules if name.split(".")[0] in FORGOTTEN]:
            del modules[name]
        namespace = {k: v for k, v in module.__dict__.items() if k not in pristine["builtins"][1]}
        namespace["__builtins__"] = pristine["builtins"][0]
        if entry := job["entry_point"]:
            function = namespace.get(entry)
            if not is_callable(function):
                raise NameError(f"no function {entry!r} was defined")
            namespace[entry] = judge(function, reject, known)
            if entry != "check":
                namespace.pop("check", None)  # only the tests' own
        execute(compile(job["tests"], "<tests>", "exec"), namespace)
        if entry and is_callable(namespace.get("check")):
            namespace["check"](namespace[entry])
        verdict = read(token_fd, 64)
    except base as error:
        try:
            verdict = f"!{type(error).__name__}: {error}"[:TEXT_LIMIT].encode("utf-8", "replace")
        except base:
            verdict = b"!an exception that cannot be shown"
    write(result_fd, verdict)
    leave(0)


def run_cell(
    job: dict[str, Any],
    options: dict[str, Any],
    pristine: dict[str, Any],
    known: dict[int, dict[str, Any]],
    isolated: bool,
) -> dict[str, Any]:
    """Fork the program into its cell, wait for its verdict or the time limit, end all that it started."""
    token_read, token_write = os.pipe()
    result_read, result_write = os.pipe()
    if isolated:
        call("unshare", PID | MOUNT | IPC)
        mount("tmpfs", BOX, "tmpfs", NOSUID | NODEV, f"size={options['file_bytes']},nr_inodes=256,mode=700")
        os.chdir(BOX)
    else:
        box = os.path.join(options["root"], str(time.monotonic_ns()))
        os.mkdir(box, 0o700)
        if os.geteuid() == 0:
            os.chown(box, NOBODY, NOBODY)
        os.chdir(box)
        if sys.platform == "linux":
            call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = time.monotonic()
    program = os.fork()
    if program == 0:
        try:
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR) if not isolated else options["null"]
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.dup2(token_read, 20)
            os.dup2(result_write, 21)
            os.closerange(3, 20)
            os.closerange(22, 64)
            if isolated:
                drop_capabilities()
            elif os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            limit(options["memory_bytes"], options["file_bytes"], options["processes"], job["timeout"])
            run_program(job, pristine, known, 20, 21)
        finally:
            os._exit(1)
    os.close(result_write)
    token = os.urandom(24).hex().encode()
    os.write(token_write, token)
    answer, late = b"", False
    while len(answer) < 4096:
        left = job["timeout"] - (time.monotonic() - start)
        if left <= 0 or not select.select([result_read], [], [], left)[0]:
            late = True
            break
        piece = os.read(result_read, 4096)
        if not piece:
            break
        answer += piece
    end_all(program, isolated)
    passed = not late and answer == token
    if passed:
        reason = "passed"
    elif late:
        reason = f"time limit of {job['timeout']:g} s"
    elif answer[:1] == b"!":
        reason = answer[1:].decode("utf-8", "replace")[:TEXT_LIMIT]
    else:
        reason = "ended before its tests were through"
    return {"passed": passed, "reason": reason, "seconds": time.monotonic() - start}


def end_all(program: int, isolated: bool) -> None:
    """Kill the program; in a pid namespace its descendants go with it, else those that the subreaper inherits."""
    try:
        os.kill(program, signal.SIGKILL)
        if not isolated:
            os.killpg(program, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if not isolated and sys.platform == "linux":
            with open(f"/proc/self/task/{os.getpid()}/children") as stream:
                for pid in stream.read().split():
                    os.kill(int(pid), signal.SIGKILL)


def emit(event: dict[str, Any]) -> None:
    """Write one line of the protocol."""
    os.write(1, json.dumps(event).encode() + b"\n")


def main() -> None:
    """Read the request, shut in, serve."""
    request = json.load(sys.stdin)
    options, isolated = request["options"], request["isolated"]
    options["null"] = os.open("/dev/null", os.O_RDWR)
    sys.path += sorted({os.path.dirname(path) for path in options["packages"]})
    for name in (*PRELOAD, *options["imports"]):
        importlib.import_module(name)
    if isolated:
        try:
            isolate(options["root"], options["packages"])
        except (OSError, AttributeError, KeyError) as error:
            emit({"refused": str(error)})
            os._exit(1)
    emit({"ready": True})
    sys.modules["__main__"] = types.ModuleType("__main__")
    pristine = {name: (sys.modules[name], dict(vars(sys.modules[name]))) for name in RESTORED}
    known = known_operators()
    gc.collect()
    gc.freeze()
    for job in request["jobs"]:
        cell = os.fork()
        if cell == 0:
            try:
                emit(run_cell(job, options, pristine, known, isolated))
                os._exit(0)
            except BaseException as error:
                emit({"passed": False, "reason": f"the sandbox failed: {error}", "seconds": 0.0, "fault": True})
            finally:
                os._exit(1)
        os.waitpid(cell, 0)
    os._exit(0)


if __name__ == "__main__":
    main()

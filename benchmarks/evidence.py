r"""The GPU runs behind docs/LOG.md in one call: side by side on one GPU, within its memory and a time limit.

    python benchmarks/evidence.py --out OUT --minutes 25 --model SmolLM2-135M-Instruct --data-dir DATA \
        --tokens-dir TOKENS --sft runs/sft [--only 'eval-*' kernels] [--list]

Jobs start in the order of `jobs`, as soon as what they need is done and their share of the device's memory is free;
some want the device for themselves. What they print is in OUT/log/, and OUT/done/ remembers those that succeeded, and
with what arguments: those of other arguments are refused. When the time is up all are asked to stop and keep what they
have: evaluations, pretraining and RL go on at the next call. A job that fails takes down those that need it, no other.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("bf16", "bf16-gemm", "nvfp4-hybrid", "mxfp8", "fp8")
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 40


@dataclass(frozen=True)
class Job:
    """A command and what it needs.

    Attributes:
        name: also of its log.
        command: arguments for this Python; ``{minutes}`` becomes the minutes that are left.
        gib: memory of the device at its peak, as it was seen on an H200.
        after: jobs that have to be done before.
        alone: no other job on the device meanwhile, because it takes times.
    """

    name: str
    command: tuple[str, ...]
    gib: float = 0.0
    after: tuple[str, ...] = ()
    alone: bool = False


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs, the most important first."""
    out: Path = options.out
    cli = ("-m", "lightning_nvfp4.cli")
    suite = ("--config", "eval/smollm2.yaml", "--data-dir", options.data_dir, "--allow-code-execution")
    suite += ("--allow-unsafe-code",) if options.allow_unsafe_code else ()
    workers = max(1, min(10, (os.cpu_count() or 1) - 6))
    arms = "bf16-gemm,nvfp4-hybrid,fp8,mxfp8,nvfp4,hybrid-bf16-forward-at-82"
    runs = out / "pretraining"
    words = ("trainer.max_steps=240", *(f"model.init_args.schedule.decay_{name}=120" for name in ("start", "steps")))
    real = ("model.init_args.max_new_tokens=128", "model.init_args.rollout.batch_size=128")
    found = [
        Job("kernels", ("benchmarks/bench_kernels.py", "--csv", str(out / "kernels.csv")), 30, alone=True),
        Job(
            "throughput",
            ("benchmarks/bench_eval.py", options.model, "--data-dir", options.data_dir, "--limit", "100")
            + ("--csv", str(out / "throughput.csv"), "--precisions", "nvfp4-hybrid"),
            60,
            alone=True,
        ),
        Job(
            "rl-words",
            (
                "benchmarks/rl_compare.py",
                "--out",
                str(out / "rl-words"),
                "--start",
                options.sft,
                "--workers",
                str(workers),
            )
            + ("--final", "20", "--minutes", "{minutes}", *words),
        ),
    ]
    for precision in PRECISIONS:
        target = ("--checkpoint", options.model, "--out", str(out / "eval"), "--precision", precision)
        found.append(Job(f"eval-{precision}", (*cli, "eval", *suite, *target), 40))
    check = ("benchmarks/check_lm_eval.py", str(out / "eval" / "smollm2.bf16.json"), "--data-dir", options.data_dir)
    train = ("benchmarks/convergence.py", "run", "--tokens-dir", options.tokens_dir, "--out", str(runs), "--keep")
    found += [
        Job("check-lm-eval", check, 40, after=("eval-bf16",)),
        Job("pretraining", (*train, "--arms", arms, "--workers", "4", "--minutes", "{minutes}"), 56),
        Job(
            "rl-gsm8k",
            ("benchmarks/rl_compare.py", "--out", str(out / "rl-gsm8k"), "--minutes", "{minutes}", "--workers", "2")
            + ("--gsm8k", str(Path(options.data_dir) / "gsm8k" / "train.jsonl"), options.model, *real),
            80,
            after=tuple(f"eval-{precision}" for precision in PRECISIONS),
        ),
        Job(
            "compare",
            (*cli, "compare", *(str(out / "eval" / f"smollm2.{p}.json") for p in PRECISIONS[1:])),
            after=tuple(f"eval-{precision}" for precision in PRECISIONS),
        ),
    ]
    return [job for job in found if any(fnmatch.fnmatch(job.name, pattern) for pattern in options.only)]


def work(todo: Sequence[Job], out: Path, gib: float, seconds: float) -> list[str]:
    """Run what is not done yet until all is or the time is up; return the names of what is left.

    Args:
        todo: in order of importance.
        out: folder of logs and marks.
        gib: memory of the device that may be given away.
        seconds: wall time.
    """
    started = time.monotonic()
    (out / "log").mkdir(parents=True, exist_ok=True)
    (out / "done").mkdir(exist_ok=True)
    waiting = [job for job in todo if not _is_done(job, out)]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    names = {job.name for job in todo}
    while waiting or running:
        left = seconds - (time.monotonic() - started)
        for job, process in list(running.items()):
            if (status := process.poll()) is None:
                continue
            del running[job]
            if not status:
                (out / "done" / job.name).write_text(_arguments(job, out), encoding="utf-8")
            print(f"{seconds - left:6.0f} s  {job.name}: {f'failed ({status})' if status else 'done'}", flush=True)
        if left <= 0:
            _stop(list(running.values()))
            break
        pending, held = {job.name for job in (*waiting, *running)}, False
        for job in list(waiting):
            if any(name in names and name not in pending and not (out / "done" / name).exists() for name in job.after):
                waiting.remove(job)
                print(f"{seconds - left:6.0f} s  {job.name}: given up, it needs {', '.join(job.after)}", flush=True)
            elif held and job.gib:
                continue
            elif not pending.intersection(job.after) and _fits(job, list(running), gib):
                waiting.remove(job)
                running[job] = _start(job, out, left)
                print(f"{seconds - left:6.0f} s  {job.name}: started", flush=True)
            else:
                held |= job.alone  # what comes after it must not keep the device from it
        if waiting and not running:
            if not any(pending.intersection(job.after) for job in waiting) and waiting[0].gib > gib:
                raise SystemExit(f"{waiting[0].name} needs {waiting[0].gib} GiB, and --gib is {gib}.")
        time.sleep(_POLL_SECONDS)
    return [job.name for job in todo if not (out / "done" / job.name).exists()]


def _is_done(job: Job, out: Path) -> bool:
    mark = out / "done" / job.name
    if not mark.exists():
        return False
    if (before := mark.read_text(encoding="utf-8")) not in ("", _arguments(job, out)):
        raise SystemExit(
            f"{out} holds {job.name} of other arguments:\n  {before}\nagainst\n  {_arguments(job, out)}\n"
            f"Give another --out, or delete {mark} to run it again."
        )
    return True


def _arguments(job: Job, out: Path) -> str:
    """Return what decides a job's results: not where they lie, and not how many runs go side by side."""
    pairs = zip(("", *job.command), job.command, strict=False)
    return " ".join(word.replace(str(out), "OUT") for before, word in pairs if before != "--workers")


def _fits(job: Job, running: Sequence[Job], gib: float) -> bool:
    on_device = [other for other in running if other.gib]
    if job.gib and (any(other.alone for other in on_device) or (job.alone and on_device)):
        return False
    return sum(other.gib for other in on_device) + job.gib <= gib


def _start(job: Job, out: Path, left: float) -> subprocess.Popen[bytes]:
    # A minute to save and report.
    words = [word.replace("{minutes}", f"{max(0.1, left / 60 - 1):.2f}") for word in job.command]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if not job.gib:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (out / "log" / f"{job.name}.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask, wait for them and for all that they started, and end what stays."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    left = list(processes)
    while left and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        left = [process for process in left if process.poll() is None or _signal_all(process, 0)]
    for process in left:
        _signal_all(process, signal.SIGKILL)
        process.wait()


def _signal_all(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a process and all that it started; return whether one was there."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    """Run and return 0 once everything is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--model", required=True, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data-dir", required=True, help="folder of eval/offline.yaml's files")
    parser.add_argument("--tokens-dir", required=True, help="what `convergence.py prepare` made")
    parser.add_argument("--sft", required=True, help="SFT checkpoint that RL on word problems starts from")
    parser.add_argument("--gib", type=float, default=130.0, help="memory of the device to give away")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of jobs, shell-style")
    parser.add_argument("--allow-unsafe-code", action="store_true", help="as nvfp4 eval takes it")
    parser.add_argument("--list", action="store_true", help="show the jobs and run none")
    options = parser.parse_args()
    options.out = options.out.resolve()
    for name in ("model", "data_dir", "tokens_dir", "sft"):
        path = Path(getattr(options, name)).expanduser()
        if not path.is_dir():
            parser.error(f"--{name.replace('_', '-')} {str(path)!r} is no folder")
        setattr(options, name, str(path.resolve()))
    todo = jobs(options)
    if options.list:
        for job in todo:
            print(f"{job.name:<16}{job.gib:>4.0f} GiB{' alone' if job.alone else ''}  {' '.join(job.command)}")
        return 0
    left = work(todo, options.out, options.gib, 60 * options.minutes)
    print(f"left: {', '.join(left)}" if left else "all done")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

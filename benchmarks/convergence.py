r"""Evidence of what the precisions cost in pretraining: runs the arms of `convergence.yaml`, resumes, and reports.

    python benchmarks/convergence.py prepare --tokens-dir TOKENS --train 'corpus/train-*.jsonl.gz' \
        --validation corpus/validation.jsonl.gz [--max-tokens 25000000] [--compress]
    python benchmarks/convergence.py run --tokens-dir TOKENS --out OUT --workers 6 --minutes 9 [--arms bf16-gemm,...]
    python benchmarks/convergence.py run --tokens-dir TOKENS --out OUT --noise
    python benchmarks/convergence.py report --out OUT

A run is an arm and a seed. Finished runs are skipped, an unfinished one goes on from its checkpoint with the same bits,
so a call may be killed at any time and given again. The `--workers` runs at a time are processes that share the device.
With `--minutes` no step starts after that time: what runs is saved, and the call ends with 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convergence_report import write_report
from convergence_run import Options, read_json, run_folder, same_identity, train
from convergence_settings import ROOT, Arm, Plan, read_plan
from convergence_tokens import prepare, unpack

from lightning_nvfp4.errors import UserError

_POLL_SECONDS = 0.5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="train a tokenizer and tokenize the text")
    make.add_argument("--tokens-dir", type=Path, required=True)
    make.add_argument("--train", nargs="+", required=True)
    make.add_argument("--validation", nargs="+", required=True)
    make.add_argument("--vocab", type=int, default=16384)
    make.add_argument("--max-tokens", type=int, default=None)
    make.add_argument("--compress", action="store_true", help="write .xz files")
    for name, text in (("run", "train what is not finished"), ("one", "train one run"), ("report", "write the report")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--config", type=Path, default=ROOT / "benchmarks" / "convergence.yaml")
        command.add_argument("--model", default="moe-200m", help="a key of the file's models")
        command.add_argument("--tokens", type=int, default=None, help="tokens of a run, instead of the file's")
        command.add_argument("--noise", action="store_true", help="two seeds of the baseline, on noise_tokens")
        if name == "report":
            continue
        command.add_argument("--tokens-dir", type=Path, required=True)
        command.add_argument("--backend", default="auto")
        command.add_argument("--keep", action="store_true", help="keep checkpoints of finished runs")
        command.add_argument("--monitor", type=int, default=0, help="steps between two looks at the numerics")
        if name == "one":
            command.add_argument("--arm", required=True)
            command.add_argument("--seed", type=int, required=True)
            command.add_argument("--deadline", type=float, default=float("inf"))
            command.add_argument("--parent", type=int, default=None)
        else:
            command.add_argument("--workers", type=_positive, default=1)
            command.add_argument("--minutes", type=float, default=None)
            command.add_argument("--arms", default=None, help="comma-separated; all of the file's without it")
            command.add_argument(
                "--seeds", default=None, type=_seeds, help="comma-separated; each arm's own without it"
            )
            command.add_argument("--whole", action="store_true", help="start no run that will not end in time")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _pending(plan: Plan, options: argparse.Namespace, about: Mapping[str, Any]) -> deque[tuple[Arm, int]]:
    """Return the runs to do: one seed of every arm before the next, so that pairs are complete early.

    Raises:
        UserError: a finished run is one of other data or settings.
    """
    arms = plan.arms if options.arms is None else [plan.arm(name.strip()) for name in options.arms.split(",")]
    if options.seeds is not None:
        arms = [dataclasses.replace(arm, seeds=options.seeds) for arm in arms]
    runs = sorted(((place, arm, seed) for arm in arms for place, seed in enumerate(arm.seeds)), key=lambda run: run[0])
    done = set()
    for _, arm, seed in runs:
        folder = run_folder(options.out, plan, arm, seed)
        if (result := read_json(folder / "result.json")) is not None:
            same_identity(folder, result, plan.identity(arm, seed, about))
            done.add((arm.name, seed))
    return deque((arm, seed) for _, arm, seed in runs if (arm.name, seed) not in done)


def _finished(out: Path, plan: Plan, arm: Arm, seed: int) -> bool:
    return (run_folder(out, plan, arm, seed) / "result.json").is_file()


def run(plan: Plan, options: argparse.Namespace) -> int:
    """Run everything that is not finished, `options.workers` at a time; return the number of runs that failed."""
    started = time.time()
    deadline = float("inf") if options.minutes is None else started + 60 * options.minutes
    about = unpack(options.tokens_dir)
    pending = _pending(plan, options, about)
    print(f"{len(pending)} runs of {plan.size.steps} steps ({plan.size.tokens} tokens)", flush=True)
    working: dict[tuple[str, int], tuple[subprocess.Popen[bytes], float]] = {}
    longest, failed = 0.0, 0
    while pending or working:
        for key, (process, since) in list(working.items()):
            if process.poll() is None:
                continue
            del working[key]
            arm = plan.arm(key[0])
            folder = run_folder(options.out, plan, arm, key[1])
            finished = _finished(options.out, plan, arm, key[1])
            longest = max(longest, time.time() - since) if finished else longest
            failed += process.returncode != 0
            word = "failed, see " + str(folder / "log.txt") if process.returncode else "stopped"
            result = read_json(folder / "result.json") or {}
            word = f"{result['status']}, loss {result.get('val_loss')}, {result['seconds']} s" if finished else word
            print(f"{time.time() - started:6.0f} s  {key[0]}, seed {key[1]}: {word}", flush=True)
        left = deadline - time.time()
        while pending and len(working) < options.workers and left > 0:
            if options.whole and longest > left:
                break
            arm, seed = pending.popleft()
            working[arm.name, seed] = (_start(plan, arm, seed, options, deadline), time.time())
        if not working and (left <= 0 or (options.whole and longest > left)):
            break
        time.sleep(_POLL_SECONDS)
    left_over = len(_pending(plan, options, about))
    print(f"{time.time() - started:6.0f} s  {left_over} runs left" + (f", {failed} failed" if failed else ""))
    return failed


def _start(plan: Plan, arm: Arm, seed: int, options: argparse.Namespace, deadline: float) -> subprocess.Popen[bytes]:
    folder = run_folder(options.out, plan, arm, seed)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "one", "--arm", arm.folder, "--seed", str(seed), "--deadline", str(deadline)]
    command += ["--out", str(options.out), "--config", str(options.config), "--model", options.model]
    command += ["--tokens", str(plan.size.tokens), "--tokens-dir", str(options.tokens_dir)]
    command += ["--backend", options.backend, "--monitor", str(options.monitor), "--parent", str(os.getpid())]
    command += ["--keep"] if options.keep else []
    threads = str(max(1, (os.cpu_count() or 1) // options.workers))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "prepare":
            about = prepare(
                options.tokens_dir,
                options.train,
                options.validation,
                vocabulary_size=options.vocab,
                max_tokens=options.max_tokens,
                compress=options.compress,
            )
            print(about)
            return 0
        plan = read_plan(options.config, options.model, options.noise, options.tokens)
        if options.command == "report":
            print(write_report(options.out, plan))
            return 0
        if options.command == "one":
            unpack(options.tokens_dir)
            how = Options(options.deadline, options.parent, options.keep, options.backend, options.monitor)
            print(train(plan, plan.arm(options.arm), options.seed, options.tokens_dir, options.out, how))
            return 0
        failed = run(plan, options)
        print(write_report(options.out, plan))
        return 1 if failed else 0
    except (UserError, OSError) as error:  # a folder that cannot be written says so itself
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

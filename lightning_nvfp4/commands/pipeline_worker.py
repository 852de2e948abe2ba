"""One arm of a pipeline: its stages in order in one process, each from where it stopped, then the evaluations.

Run as a module with the path of a job file; `pipeline.py` writes it and watches `progress.json` beside it.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError

_PR_SET_PDEATHSIG = 1
_REFRESH_SECONDS = 0.5


def main(job_path: str) -> int:
    """Run the job and return the exit status: 0, 2 for a mistake in the input, 1 for anything else."""
    _die_with_parent()
    path = Path(job_path)
    job = json.loads(path.read_text(encoding="utf-8"))
    folder = path.parent
    progress = Progress(folder / "progress.json")
    try:
        with _exclusive(folder):
            _limit_threads(int(job["threads"]))
            for stage in job["stages"]:
                _run_stage(job, stage, folder, progress)
                if stage["evaluate"]:
                    _evaluate(job, stage["name"], folder, progress)
            progress.write(state="done")
    except UserError as error:
        print(f"nvfp4: error: {error}", flush=True)
        progress.write(state="failed", message=str(error))
        return 2
    except SystemExit:  # asked to end, and has saved; the stage is not done
        progress.write(state="failed", message="ended by SIGTERM")
        return 1
    except Exception as error:
        traceback.print_exc()
        progress.write(state="failed", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


class Progress:
    """The small file the parent reads; replaced whole, so it is never seen half written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}

    def write(self, **values: Any) -> None:
        """Merge `values` and replace the file."""
        self.values |= values
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.values), encoding="utf-8")
        os.replace(temporary, self.path)


def _run_stage(job: dict[str, Any], stage: dict[str, Any], folder: Path, progress: Progress) -> None:
    root = folder / stage["name"]
    if (root / "done.json").is_file():
        return
    # Heavy, and not needed by a job that is done.
    from lightning.pytorch import Callback, Trainer

    from lightning_nvfp4.commands.fit import run

    class Report(Callback):
        """Tells the parent where the stage is, at most twice a second."""

        def __init__(self) -> None:
            self.last = 0.0

        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            progress.write(step=trainer.global_step, max_steps=trainer.max_steps)

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            if time.monotonic() - self.last < _REFRESH_SECONDS:
                return
            self.last = time.monotonic()
            metrics = {
                name: float(trainer.callback_metrics[name]) for name in _SHOWN if name in trainer.callback_metrics
            }
            progress.write(step=trainer.global_step, max_steps=trainer.max_steps, metrics=metrics)

    progress.write(state="running", stage=stage["name"], step=0, max_steps=0, metrics={})
    start = time.monotonic()
    trainer = run(fit_arguments(job, stage, folder), [Report()])
    if trainer.interrupted or trainer.global_step < trainer.max_steps:
        raise UserError(
            f"stage {stage['name']} stopped at step {trainer.global_step} of {trainer.max_steps}: the data ended or "
            "training was interrupted. Give more data or fewer trainer.max_steps, and start the pipeline again."
        )
    done = {"stage": stage["name"], "step": trainer.global_step, "seconds": round(time.monotonic() - start, 1)}
    _write_whole(root / "done.json", json.dumps(done))


_SHOWN = ("train/loss", "rl/reward")


def fit_arguments(job: dict[str, Any], stage: dict[str, Any], folder: Path) -> list[str]:
    """Return the words of the `nvfp4 fit` that runs, or continues, a stage."""
    root = folder / stage["name"]
    configs = [stage["config"], *job["overlays"], job["overlay"]]
    words = ["fit", *(f"--config={name}" for name in configs), f"--seed_everything={job['seed']}"]
    words.append(f"--trainer.default_root_dir={root}")
    words.append("--trainer.enable_progress_bar=false")
    for section in stage["seeded"]:
        words.append(f"--{section}.init_args.seed={job['seed']}")
    if stage["starts_from"]:
        words.append("--model.init_args.model=null")
        words.append(f"--model.init_args.pretrained={folder / stage['starts_from']}")
    words += [f"--{key}={_word(value)}" for key, value in stage["set"].items()]
    own = root / "checkpoints" / "last.ckpt"
    if own.exists():
        words.append(f"--ckpt_path={own}")
    elif stage["continues"]:
        words.append(f"--ckpt_path={folder / stage['continues'] / 'checkpoints' / 'last.ckpt'}")
    else:
        words.append("--ckpt_path=null")
    return words


def _evaluate(job: dict[str, Any], stage: str, folder: Path, progress: Progress) -> None:
    out = folder / "eval" / f"{stage}.json"
    if out.is_file():
        return
    from lightning_nvfp4.evaluation.run import evaluate

    progress.write(state="running", stage=f"eval {stage}", step=0, max_steps=0, metrics={})
    out.parent.mkdir(parents=True, exist_ok=True)
    evaluate(
        folder / stage,
        job["eval"]["config"],
        job["precision"],
        out,
        limit=job["eval"]["limit"],
        allow_code_execution=job["allow_code_execution"],
        seed=job["seed"],
        overrides=job["overrides"],
        progress=False,
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the arm's lock; an orphan of a killed parent may need a moment to go."""
    with (folder / ".lock").open("w") as file:
        for _ in range(100):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise UserError(f"{folder} is being written by another pipeline: wait for it, or give another --out.")
        yield


def _die_with_parent() -> None:
    """Have the kernel end this process with its parent, so that a killed pipeline leaves no worker behind."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "fit":  # another rank of a stage on several devices, started by Lightning
        sys.exit(importlib.import_module("lightning_nvfp4.cli").main(sys.argv[1:]))
    sys.exit(main(sys.argv[1]))

"""`nvfp4 pipeline`: every stage in every arm, some arms at a time, each a process of its own; then the report."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_nvfp4.commands.console import make_console
from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.pipeline_spec import Arm, Pipeline, differences, load_arm, load_pipeline, record
from lightning_nvfp4.commands.pipeline_view import ArmState, View
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.errors import UserError

_RECORD = "pipeline.json"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
_LOG_LINES = 15


def run(arguments: list[str]) -> int:
    """Run the pipeline named on the command line and return the exit status."""
    parser = Parser("nvfp4 pipeline", "Run all stages of a pipeline in several precisions, evaluate, write a report.")
    parser.add_argument("--config", default="recipes/pipeline.yaml", help="pipeline YAML (default: %(default)s)")
    parser.add_argument("--out", default="runs/pipeline", help="folder of the results (default: %(default)s)")
    parser.add_argument("--arms", help="precisions or overlay files, separated by commas; default: those of the YAML")
    parser.add_argument("--lanes", type=int, help="arms that run at the same time; default: that of the YAML")
    parser.add_argument("--restart", action="store_true", help="delete the results in --out and begin anew")
    parser.add_argument(
        "--allow-code-execution", action="store_true", help="let the sandbox run code that the models write"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. seed=1 pretrain.trainer.max_steps=50")
    options = parser.parse_args(arguments)
    if options.lanes is not None:
        options.overrides.append(f"lanes={options.lanes}")
    if options.arms is not None:
        options.overrides.append(f"arms=[{options.arms}]")
    pipeline = load_pipeline(options.config, options.overrides)
    arms = [load_arm(name) for name in pipeline.arms]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"arms: {name!r} is given twice: keep one, or give the other overlay another file name.")
    out = Path(options.out)
    values = record(pipeline, arms)
    if pipeline.baseline not in names:
        raise UserError(
            f"baseline {pipeline.baseline!r} is none of the arms {', '.join(names)}: add it, or set baseline=."
        )
    if options.restart and (out / _RECORD).is_file():
        _restart(out)
    else:
        _check_folder(out, values)
    console = make_console()
    with _lock(out):
        _save_record(out, pipeline, names, values)
        jobs = [_write_job(pipeline, arm, out, options.allow_code_execution) for arm in arms]
        failed = _run_arms(jobs, names, pipeline.lanes, pipeline.threads, console)
    if failed:
        return failed
    from lightning_nvfp4.evaluation.report import write_report

    report = write_report(out, baseline=pipeline.baseline, notes=pipeline.notes)
    from lightning_nvfp4.commands.pipeline_summary import print_summary

    print_summary(out / "report.json", console)
    console.print(f"Report: {report.resolve()}", markup=False, soft_wrap=True)
    return 0


def _check_folder(out: Path, values: dict[str, Any]) -> None:
    """Refuse a folder that is not ours, or that holds the results of another configuration."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: give a folder.")
    file = out / _RECORD
    if not file.is_file():
        if out.exists() and any(name for name in os.listdir(out) if name != ".lock"):
            raise UserError(f"--out {out} is not empty and holds no pipeline: give a new folder.")
        return
    lines = differences(_read_record(file)["configuration"], values)
    if lines:
        more = f"\n  and {len(lines) - 12} more" if len(lines) > 12 else ""
        raise UserError(
            f"--out {out} holds the results of another configuration:\n  " + "\n  ".join(lines[:12]) + more + "\n"
            "Give another --out to keep both, or --restart to delete these and begin anew."
        )


def _read_record(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content["configuration"], dict) and all("name" in arm for arm in content["arms"]):
            return content
        reason = "fields of other types"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = repr(error)
    raise UserError(
        f"{file} is no record of a pipeline ({reason}): give another --out, or --restart to delete the results and "
        "begin anew."
    )


def _restart(out: Path) -> None:
    with _lock(out):
        for job in out.glob("*/job.json"):
            shutil.rmtree(job.parent)
        for name in ("report.html", "report.md", "report.json", _RECORD):
            (out / name).unlink(missing_ok=True)


def _save_record(out: Path, pipeline: Pipeline, names: list[str], values: dict[str, Any]) -> None:
    """Write what the folder holds: for the next start, which compares, and for the report, which reads the names."""
    file = out / _RECORD
    old = _read_record(file) if file.is_file() else {}
    arms = [arm["name"] for arm in old.get("arms", [])]
    content = {
        "arms": [{"name": name} for name in [*names, *(arm for arm in arms if arm not in names)]],
        "baseline": pipeline.baseline,
        "stages": [{"name": stage.name} for stage in pipeline.stages],
        "configuration": {**old.get("configuration", {}), **values},
    }
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(temporary, file)


def _write_job(pipeline: Pipeline, arm: Arm, out: Path, allow_code_execution: bool) -> Path:
    """Write what the arm's worker is to do, and return the file."""
    stages = []
    for stage in pipeline.stages:
        path = find_config(stage.config)
        values = read_mapping(path)
        seeded = [key for key in ("model", "data") if _is_ours(values.get(key))]
        stages.append(
            {
                "name": stage.name,
                "config": str(path),
                "continues": stage.continues,
                "starts_from": stage.starts_from,
                "set": stage.set,
                "seeded": seeded,
                "evaluate": bool(pipeline.eval and stage.name in pipeline.eval.stages),
            }
        )
    job = {
        "precision": arm.precision,
        "overrides": arm.overrides,
        "overlay": arm.overlay,
        "overlays": [str(find_config(name)) for name in pipeline.overlays],
        "seed": pipeline.seed,
        "threads": pipeline.threads,
        "stages": stages,
        "eval": pipeline.eval and {"config": str(find_config(pipeline.eval.config)), "limit": pipeline.eval.limit},
        "allow_code_execution": allow_code_execution,
    }
    folder = out / arm.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(job, indent=1), encoding="utf-8")
    os.replace(temporary, file)
    return file


def _is_ours(section: Any) -> bool:
    return isinstance(section, dict) and str(section.get("class_path", "")).startswith("lightning_nvfp4.")


def _is_done(job: Path) -> bool:
    folder = job.parent
    return all(
        (folder / stage["name"] / "done.json").is_file()
        and (not stage["evaluate"] or (folder / "eval" / f"{stage['name']}.json").is_file())
        for stage in json.loads(job.read_text(encoding="utf-8"))["stages"]
    )


def _run_arms(jobs: list[Path], names: list[str], lanes: int, threads: int, console: Console) -> int:
    """Run the workers, `lanes` at a time; return the exit status of the first that failed, else 0."""
    states = [ArmState(name) for name in names]
    waiting = list(zip(jobs, states, strict=True))
    running: dict[subprocess.Popen[bytes], tuple[Path, ArmState]] = {}
    failed: list[tuple[Path, ArmState, int]] = []
    with _stopping_children(running), View(states, console) as view:
        while waiting or running:
            while waiting and len(running) < lanes:
                job, state = waiting.pop(0)
                if _is_done(job):
                    state.state = "done"
                    continue
                running[_start(job, threads)] = (job, state)
                state.state, state.started = "running", time.monotonic()
            time.sleep(_POLL_SECONDS)
            for child in list(running):
                job, state = running[child]
                state.read(job.parent)
                status = child.poll()
                if status is None:
                    continue
                del running[child]
                state.seconds, state.started = time.monotonic() - (state.started or 0.0), None
                state.state = "done" if status == 0 else "failed"
                if status != 0:
                    failed.append((job, state, status))
                    # A mistake in the input is the same in every arm; a crash may be this arm's own.
                    waiting = [] if status == 2 else waiting
            view.update()
    for job, state, status in failed:
        _explain(job, state, status, console)
    return 2 if any(status == 2 for *_, status in failed) else int(bool(failed))


def _start(job: Path, threads: int) -> subprocess.Popen[bytes]:
    (job.parent / "progress.json").unlink(missing_ok=True)
    variables = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
    with (job.parent / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_nvfp4.commands.pipeline_worker", str(job)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )


def _explain(job: Path, state: ArmState, status: int, console: Console) -> None:
    log = job.parent / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    how = f"killed by signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    console.print(f"\n{state.name} failed in stage {state.stage or 'start'} ({how}):", markup=False, soft_wrap=True)
    errors = [line for line in lines if line.startswith("nvfp4: error:")]
    for line in errors[-1:] or lines[-_LOG_LINES:]:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"  Log: {log}. Mend the cause and run the same command: it goes on where it stopped.", markup=False)


@contextmanager
def _stopping_children(running: dict[subprocess.Popen[bytes], tuple[Path, ArmState]]) -> Iterator[None]:
    """Whatever ends the block, end the workers with it; SIGTERM counts as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for child in running:
            child.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in running:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two pipelines never write it at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}): give another folder.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {out}: another pipeline is writing it: wait for it, or give another folder."
            ) from None
        yield

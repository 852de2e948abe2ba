"""How the pipeline handles its workers: lanes, failures, and being stopped. The workers here are small scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from lightning_nvfp4.commands import pipeline

_STAGES = [{"name": "pretrain", "evaluate": False}]


@pytest.fixture
def console(tmp_path: Path):
    with (tmp_path / "said.txt").open("w", encoding="utf-8") as file:
        yield Console(file=file, width=140)


def _jobs(folder: Path, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Make each arm's worker run its script, in the arm's folder."""
    jobs = []
    for name in scripts:
        (folder / name).mkdir()
        (folder / name / "job.json").write_text(json.dumps({"stages": _STAGES}), encoding="utf-8")
        jobs.append(folder / name / "job.json")

    def start(job: Path, threads: int) -> subprocess.Popen[bytes]:
        with (job.parent / "log.txt").open("ab") as log:
            command = [sys.executable, "-c", scripts[job.parent.name]]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=job.parent, start_new_session=True)

    monkeypatch.setattr(pipeline, "_start", start)
    return jobs


def _said(folder: Path, console: Console) -> str:
    console.file.flush()
    return (folder / "said.txt").read_text(encoding="utf-8")


def test_no_more_arms_at_a_time_than_lanes(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, time; mark = '../up-' + os.path.basename(os.getcwd())\n"
        "open(mark, 'w'); time.sleep(.6); os.remove(mark)"
    )
    jobs = _jobs(tmp_path, dict.fromkeys("abc", script), monkeypatch)
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            most[0] = max(most[0], len(list(tmp_path.glob("up-*"))))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert pipeline._run_arms(jobs, list("abc"), 2, 1, console) == 0
    finally:
        over.set()
        watcher.join()
    assert most[0] == 2


def test_a_mistake_in_the_input_stops_what_has_not_begun(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"a": "print('noise'); print('nvfp4: error: data.path is empty'); exit(2)", "b": "open('ran', 'w')"}
    assert pipeline._run_arms(_jobs(tmp_path, scripts, monkeypatch), ["a", "b"], 1, 1, console) == 2
    said = _said(tmp_path, console)
    assert "a failed in stage start (exit status 2)" in said
    assert "nvfp4: error: data.path is empty" in said and "noise" not in said
    assert "run the same command" in said
    assert not (tmp_path / "b" / "ran").exists()


def test_a_crash_leaves_the_other_arms_running(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {
        "a": "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
        "b": "open('ran', 'w')",
    }
    assert pipeline._run_arms(_jobs(tmp_path, scripts, monkeypatch), ["a", "b"], 1, 1, console) == 1
    said = _said(tmp_path, console)
    assert "SIGSEGV" in said and "last words" in said
    assert (tmp_path / "b" / "ran").exists()


def test_an_arm_that_is_done_is_not_started(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = _jobs(tmp_path, {"a": "exit(1)"}, monkeypatch)
    (tmp_path / "a" / "pretrain").mkdir()
    (tmp_path / "a" / "pretrain" / "done.json").write_text("{}", encoding="utf-8")
    assert pipeline._run_arms(jobs, ["a"], 1, 1, console) == 0


def test_sigterm_ends_the_workers(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    jobs = _jobs(tmp_path, {"a": script}, monkeypatch)

    def stop() -> None:
        while not (tmp_path / "a" / "pid").exists() or not (tmp_path / "a" / "pid").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pipeline._run_arms(jobs, ["a"], 1, 1, console)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "a" / "pid").read_text()), 0)


def test_two_pipelines_never_write_one_folder(tmp_path: Path) -> None:
    from lightning_nvfp4.errors import UserError

    with pipeline._lock(tmp_path), pytest.raises(UserError, match="another pipeline"), pipeline._lock(tmp_path):
        pass


def test_restart_removes_the_results_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mxfp8").mkdir()
    (tmp_path / "mxfp8" / "job.json").write_text("{}", encoding="utf-8")
    (tmp_path / "pipeline.json").write_text("{}", encoding="utf-8")
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    pipeline._restart(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == ["mine.txt"]

"""`benchmarks/evidence.py`: who runs beside whom, what needs what, and what a time limit leaves."""

import time

import pytest
from evidence import Job, work


def code(tmp_path, name, seconds=0.3, status=0):
    """Write down when it ran; end as asked when told to."""
    text = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        f"path = pathlib.Path({str(tmp_path)!r}) / {name!r}\n"
        "start = time.time()\n"
        f"time.sleep({seconds})\n"
        "path.write_text(f'{start} {time.time()}')\n"
        f"sys.exit({status})"
    )
    return ("-c", text)


def times(tmp_path, name):
    return tuple(map(float, (tmp_path / name).read_text().split()))


def test_memory_order_and_solitude_are_kept(tmp_path):
    todo = [
        Job("a", code(tmp_path, "a"), gib=60),
        Job("b", code(tmp_path, "b"), gib=60),
        Job("big", code(tmp_path, "big"), gib=40),
        Job("next", code(tmp_path, "next"), after=("a",)),
        Job("alone", code(tmp_path, "alone"), gib=1, alone=True),
        Job("host", code(tmp_path, "host")),
    ]
    assert work(todo, tmp_path / "out", 130, 60) == []
    spans = {job.name: times(tmp_path, job.name) for job in todo}

    def together(a, b):
        return spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]

    assert together("a", "b") and together("a", "host")
    assert not (together("big", "a") and together("big", "b"))
    assert spans["next"][0] >= spans["a"][1]
    assert not any(together("alone", other) for other in ("a", "b", "big"))
    begun = time.time()
    assert work(todo, tmp_path / "out", 130, 60) == []
    assert time.time() - begun < 0.25, "nothing is run twice"


def test_a_failure_takes_down_what_needs_it_and_no_other(tmp_path, capsys):
    todo = [
        Job("bad", code(tmp_path, "bad", status=3)),
        Job("needs", code(tmp_path, "needs"), after=("bad",)),
        Job("good", code(tmp_path, "good")),
    ]
    assert work(todo, tmp_path / "out", 1, 60) == ["bad", "needs"]
    assert not (tmp_path / "needs").exists() and (tmp_path / "good").exists()
    assert "bad: failed (3)" in capsys.readouterr().out
    assert work(todo[:1], tmp_path / "out", 1, 60) == ["bad"], "it is tried again"


def test_what_was_done_with_other_arguments_is_not_taken_for_done(tmp_path):
    def job(model, out, workers):
        return Job("eval", ("-c", "pass", "--model", model, "--out", str(out / "eval"), "--workers", workers))

    out = tmp_path / "out"
    assert work([job("a", out, "1")], out, 1, 60) == []
    assert work([job("a", out, "2")], out, 1, 60) == []
    out = out.rename(tmp_path / "moved")
    assert work([job("a", out, "1")], out, 1, 60) == []
    with pytest.raises(SystemExit, match=r"--model a --out OUT/eval(.|\n)*against(.|\n)*--model b.*\n.*another --out"):
        work([job("b", out, "1")], out, 1, 60)


def test_the_limit_stops_what_runs(tmp_path):
    todo = [Job("long", code(tmp_path, "long", seconds=60)), Job("short", code(tmp_path, "short", seconds=0.1))]
    begun = time.time()
    assert work(todo, tmp_path / "out", 1, 1.5) == ["long"]
    assert time.time() - begun < 20 and not (tmp_path / "long").exists()


def test_what_a_job_has_started_may_save_before_it_is_ended(tmp_path):
    """Also when the job itself is gone: the driver of `convergence.py` leaves its workers to end by themselves."""
    child = code(tmp_path, "child", seconds=1.5)[1]
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    assert work([Job("parent", ("-c", parent))], tmp_path / "out", 1, 0.8) == ["parent"]
    assert (tmp_path / "child").exists()

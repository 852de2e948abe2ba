"""`nvfp4 compare` on the command line: what it prints, whole, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_nvfp4 import cli
from lightning_nvfp4.evaluation.results import EvalResult, Sample, Score


def result(path: Path, precision: str, right: int) -> Path:
    task = "a_task_with_a_name_that_leaves_little_room_for_the_rest_of_its_line"
    samples = tuple(Sample(task, "exact_match", str(i), float(i < right), choice=int(i < right)) for i in range(100))
    score = Score(task, "exact_match", right / 100, None, 100)
    return EvalResult("s", precision, "reference", True, "c", (score,), samples=samples).write(path)


def test_tables_are_whole_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    a, b = result(tmp_path / "a.json", "bf16-gemm", 80), result(tmp_path / "b.json", "nvfp4", 60)
    assert cli.main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("a_task"))
    assert "a_task_with_a_name_that_leaves_little_room_for_the_rest_of_its_line" in line
    assert "worse by 20.0 ± 7.8 points" in line and "+0 / -20" in line
    assert "Holm" in said


def test_arms_of_seeds_and_a_folder_of_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(result(tmp_path / f"{name}.json", name[:-1], right)) for name, right in
             (("x1", 80), ("x2", 78), ("y1", 79), ("y2", 81))]  # fmt: skip
    out = tmp_path / "report"
    assert cli.main(["compare", "--arm", "x", *paths[:2], "--arm", "y", *paths[2:], "--out", str(out)]) == 0
    assert "within noise" in capsys.readouterr().out
    content = json.loads((out / "compare.json").read_text())
    assert content["baseline"] == "x" and content["rows"][0]["deltas"][0]["test"] == "t over seeds"
    assert sorted(path.name for path in out.iterdir()) == ["compare.html", "compare.json", "compare.md"]


def test_arms_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(result(tmp_path / "a.json", "x", 5))
    for arguments, words in (
        (["--arm", "x"], "no path behind the name"),
        (["--arm", "x", path, "--arm", "x", path], "given twice"),
        (["--arm", "x", path], "need at least two"),
        (["--arm", "x", path, "--arm", "y", "nowhere"], "no such file"),
    ):
        assert cli.main(["compare", *arguments]) != 0
        said = capsys.readouterr()
        assert words in said.out + said.err


def test_brackets_in_names_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = result(tmp_path / "[red]a.json", "bf16-gemm", 80), result(tmp_path / "[" / "b].json", "nvfp4", 60)
    assert cli.main(["compare", "--arm", "[red]", str(a), "--arm", "[/b]", str(b)]) == 0
    said = capsys.readouterr().out
    assert "against [red]" in said and "[/b]" in said

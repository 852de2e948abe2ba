"""Runs pair by document, and verdicts say what the documents support."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.compare import SAME, WITHIN_NOISE, compare, compare_results, paired_delta
from lightning_nvfp4.evaluation.curves import loss_gap, read_curves
from lightning_nvfp4.evaluation.results import EvalResult, Sample, Score, read_result


def result(precision: str, values: list[float], ids: list[int] | None = None, **fields) -> EvalResult:
    ids = list(range(len(values))) if ids is None else ids
    samples = [Sample("word", "exact_match", f"doc{i}", v, "r", "t", "p") for i, v in zip(ids, values, strict=True)]
    score = Score("word", "exact_match", sum(values) / len(values), 0.1, len(values))
    return EvalResult("s", precision, "reference", False, "c", (score,), samples=tuple(samples), **fields)


BASE = [1.0] * 120 + [0.0] * 80


def test_pairs_by_document_not_by_position() -> None:
    shuffled = np.random.default_rng(0).permutation(200)
    other = result("mxfp8", [BASE[i] for i in shuffled], shuffled.tolist())
    delta = compare_results({"a": result("bf16-gemm", BASE), "b": other}).rows[0].deltas[0]
    assert (delta.delta, delta.low, delta.high, delta.gained, delta.lost, delta.p) == (0, 0, 0, 0, 0, 1.0)
    assert delta.verdict == SAME


def test_verdicts() -> None:
    def verdict(gained: int, lost: int, higher: bool = True) -> str:
        run = list(BASE)
        run[:lost] = [0.0] * lost
        run[120 : 120 + gained] = [1.0] * gained
        name = dict(enumerate(BASE))
        return paired_delta(
            "r", {str(k): v for k, v in name.items()}, {str(k): v for k, v in enumerate(run)}, higher
        ).verdict

    assert verdict(10, 12) == WITHIN_NOISE
    assert verdict(0, 20).startswith("worse by 10.0 ± 4.")
    assert verdict(20, 0).startswith("better by 10.0 ± 4.")
    assert verdict(20, 0, higher=False).startswith("worse by 10.0")
    assert verdict(0, 5) == WITHIN_NOISE, "five of five has p = 1/16, whatever the bootstrap says"


def test_refuses_other_documents() -> None:
    a = result("bf16-gemm", BASE)
    with pytest.raises(UserError, match=r"word exact_match: a and b scored different documents \(200 and 199, 199 in"):
        compare_results({"a": a, "b": result("mxfp8", BASE[:-1])})
    with pytest.raises(UserError, match="100 in common"):
        compare_results({"a": a, "b": result("mxfp8", BASE, list(range(100, 300)))})


def test_files_round_trip_and_are_labelled_by_what_differs(tmp_path: Path) -> None:
    worse = [0.0] * 30 + BASE[30:]
    for arm, values in (("bf16-gemm", BASE), ("nvfp4", worse)):
        written = result(arm, values, notes=("n",), skipped={"code": "no permission"})
        assert read_result(written.write(tmp_path / arm / "eval" / "sft.json")) == written
    paths = [tmp_path / "nvfp4" / "eval" / "sft.json", tmp_path / "bf16-gemm" / "eval"]
    comparison = compare(paths, baseline="bf16-gemm")
    assert comparison.baseline == "bf16-gemm/eval/sft"
    assert comparison.runs == ("nvfp4/eval/sft",)
    text = comparison.to_markdown()
    assert "worse by 15.0 ±" in text and "Emulated numerics" in text and "code was skipped" in text
    assert json.loads((comparison.write(tmp_path / "c.json")).read_text())["rows"][0]["deltas"][0]["lost"] == 30
    assert "| word | exact_match | 200 | 60.0 | 45.0 | -15.0 [" in (comparison.write(tmp_path / "c.md")).read_text()
    assert comparison.to_rich().row_count == 1


def test_errors(tmp_path: Path) -> None:
    path = result("bf16-gemm", BASE).write(tmp_path / "a.json")
    with pytest.raises(UserError, match="need at least two"):
        compare([path])
    with pytest.raises(UserError, match="no such result"):
        compare([path, tmp_path / "b.json"])
    with pytest.raises(UserError, match="given twice"):
        compare([path, path])
    other = result("mxfp8", BASE).write(tmp_path / "b.json")
    with pytest.raises(UserError, match="baseline 'fp8' matches no run: choose one of a, b"):
        compare([path, other], baseline="fp8")
    lines = (tmp_path / "b.samples.jsonl").read_text().splitlines()
    (tmp_path / "b.samples.jsonl").write_text("\n".join(lines[:3]) + "\n{")
    with pytest.raises(UserError, match="line 4: not a sample"):
        compare([path, other])
    (tmp_path / "b.samples.jsonl").unlink()
    with pytest.raises(UserError, match="runs pair by it"):
        compare([path, other])
    other.write_text("{")
    with pytest.raises(UserError, match="no readable evaluation result"):
        read_result(other)


def test_line_ends_inside_an_answer_are_read_back(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\n"
    samples = tuple(Sample("word", "exact_match", str(i), 1.0, response=text) for i in range(2))
    path = replace(result("bf16-gemm", BASE), samples=samples).write(tmp_path / "a.json")
    assert read_result(path).samples == samples


@pytest.mark.parametrize("change", [{"scores": [1]}, {"scores": None}, {"more": 1}, {"notes": 1}, {"scores": []}])
def test_a_damaged_result_is_named(change: dict, tmp_path: Path) -> None:
    path = result("bf16-gemm", BASE).write(tmp_path / "a.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=r"a\..*Evaluate again"):
        read_result(path)


def write_metrics(path: Path, losses: list[float], val: float | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ["step,train/loss,val/loss"] + [f"{i},{loss}," for i, loss in enumerate(losses)]
    if val is not None:
        rows.append(f"{len(losses) - 1},,{val}")
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_relative_loss_gap(tmp_path: Path) -> None:
    base = write_metrics(tmp_path / "a" / "metrics.csv", [4.0 - 0.02 * i for i in range(100)], 2.0)
    run = write_metrics(tmp_path / "b" / "metrics.csv", [1.01 * (4.0 - 0.02 * i) for i in range(80)], 2.1)
    gap = loss_gap(run, base)
    assert gap.steps == list(range(80)), "only steps that both have"
    assert gap.relative == pytest.approx([0.01] * 80)
    assert gap.final == pytest.approx(0.01)
    assert gap.validation == pytest.approx(0.05)
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    assert "+1.00 % relative" in comparison.to_markdown()
    with pytest.raises(UserError, match="no column train/x"):
        loss_gap(run, base, "train/x")


def test_smoothing_is_the_trailing_mean(tmp_path: Path) -> None:
    curve = read_curves(write_metrics(tmp_path / "m.csv", [1.0, 3.0, 5.0, 7.0]))["train/loss"]
    assert curve.smoothed(2).values.tolist() == [1.0, 2.0, 4.0, 6.0]
    assert curve.smoothed(1).values.tolist() == curve.values.tolist()
    assert (curve.start(2), curve.end(2), curve.end()) == (2.0, 6.0, 7.0)


def test_not_a_number_is_left_out_of_curves(tmp_path: Path) -> None:
    curve = read_curves(write_metrics(tmp_path / "m.csv", [1.0, float("nan"), 2.0]))["train/loss"]
    assert curve.steps.tolist() == [0, 2]

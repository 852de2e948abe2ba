"""Runs pair by document, and verdicts say what the documents support."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.compare import Comparison, compare, compare_results
from lightning_nvfp4.evaluation.compare_page import rich_tables, write
from lightning_nvfp4.evaluation.curves import loss_gap, read_curves
from lightning_nvfp4.evaluation.paired import SAME, WITHIN_NOISE, Delta
from lightning_nvfp4.evaluation.results import EvalResult, Sample, Score, read_result


def result(
    precision: str,
    values: list[float],
    ids: list[int] | None = None,
    *,
    tasks: tuple[str, ...] = ("word",),
    metric: str = "exact_match",
    higher: bool = True,
    choices: list | None = None,
    logprobs: list[float] | None = None,
    prompt: str = "p",
    version: str = "1",
    **fields,
) -> EvalResult:
    ids = list(range(len(values))) if ids is None else ids
    none: list = [None] * len(values)
    samples, scores = [], []
    for task in tasks:
        for i, value, choice, logprob in zip(ids, values, choices or none, logprobs or none, strict=True):
            samples.append(Sample(task, metric, f"doc{i}", value, "r", "t", prompt, choice=choice, logprob=logprob))
        scores.append(Score(task, metric, sum(values) / len(values), 0.1, len(values), higher, version))
    fields = {"suite": "s", "checkpoint": "c", **fields}
    return EvalResult(
        precision=precision, backend="reference", native=False, scores=tuple(scores), samples=tuple(samples), **fields
    )


def only(comparison: Comparison) -> Delta:
    (row,) = comparison.rows
    (delta,) = row.deltas
    return delta


BASE = [1.0] * 120 + [0.0] * 80


def test_pairs_by_document_not_by_position() -> None:
    shuffled = np.random.default_rng(0).permutation(200)
    other = result("mxfp8", [BASE[i] for i in shuffled], shuffled.tolist())
    delta = only(compare_results({"a": result("bf16-gemm", BASE), "b": other}))
    assert (delta.delta, delta.gained, delta.lost, delta.p, delta.verdict) == (0, 0, 0, 1.0, SAME)
    assert 0.018 < delta.high == -delta.low < 0.019, "200 documents without a change leave room for a few in a thousand"


def test_verdicts() -> None:
    def verdict(gained: int, lost: int, higher: bool = True) -> str:
        run = list(BASE)
        run[:lost] = [0.0] * lost
        run[120 : 120 + gained] = [1.0] * gained
        pair = {"a": result("bf16-gemm", BASE, higher=higher), "b": result("mxfp8", run, higher=higher)}
        return only(compare_results(pair)).verdict

    assert verdict(10, 12) == WITHIN_NOISE
    assert verdict(0, 20).startswith("worse by 10.0 ± 4.") and verdict(0, 20).endswith("points")
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
    html, markdown, data = write(comparison, tmp_path / "out")
    text = markdown.read_text()
    assert "worse by 15.0 ±" in text and "Emulated numerics" in text and "code was skipped" in text
    assert "| word | exact_match | 200 | nvfp4/eval/sft | 45.0 | 60.0 | -15.0 [" in text
    assert "Holm" in text and "<svg" in html.read_text()
    content = json.loads(data.read_text())
    assert content["rows"][0]["deltas"][0]["lost"] == 30
    assert dict(content["sources"])["nvfp4/eval/sft"]["task_versions"] == {"word": "1"}
    assert rich_tables(comparison)[0].row_count == 1
    assert write(comparison, tmp_path / "c.md") == [tmp_path / "c.md"]


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
    (markdown,) = write(compare([tmp_path / "a", tmp_path / "b"]), tmp_path / "c.md")
    assert "+1.00 % relative" in markdown.read_text()
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


def test_the_gap_of_several_seeds_is_that_of_their_mean_curves(tmp_path: Path) -> None:
    for name, factor in (("a0", 0.99), ("a1", 1.01), ("b0", 1.02), ("b1", 1.04)):
        write_metrics(tmp_path / name / "metrics.csv", [factor * (4.0 - 0.02 * i) for i in range(100)])
    arms = {"a": [tmp_path / "a0", tmp_path / "a1"], "b": [tmp_path / "b0", tmp_path / "b1"]}
    ((run, gap),) = compare([], arms=arms).losses
    assert run == "b" and gap.final == pytest.approx(0.03)


def test_verdicts_are_corrected_for_the_number_of_tasks() -> None:
    worse = [0.0] * 6 + BASE[6:]  # p = 2 / 2**6 = .031
    alone = only(compare_results({"a": result("bf16-gemm", BASE), "b": result("nvfp4", worse)}))
    assert alone.p_holm == alone.p == 1 / 32 and alone.verdict.startswith("worse")
    tasks = ("word", "other")
    both = compare_results({"a": result("bf16-gemm", BASE, tasks=tasks), "b": result("nvfp4", worse, tasks=tasks)})
    for row in both.rows:
        (delta,) = row.deltas
        assert delta.p_holm == 1 / 16 and delta.verdict == WITHIN_NOISE and delta.high < 0
        assert delta.detectable > alone.detectable


def test_graded_scores_and_other_units() -> None:
    generator = np.random.default_rng(0)
    base = generator.integers(0, 5, 300) / 4
    run = np.clip(base - generator.choice([0, 0.25], 300, p=[0.7, 0.3]), 0, 1)
    delta = only(compare_results({"a": result("bf16-gemm", base.tolist()), "b": result("nvfp4", run.tolist())}))
    assert delta.test == "sign flip" and delta.gained is None and delta.verdict.startswith("worse by ")
    pair = {
        "a": result("bf16-gemm", (base + 3).tolist(), metric="bits_per_byte", higher=False),
        "b": result("nvfp4", (base + 3.5).tolist(), metric="bits_per_byte", higher=False),
    }
    assert only(compare_results(pair)).verdict == "worse by 0.5 ± 0", "no share, so no points; lower is better"


def test_answers_and_their_likelihoods_show_what_scores_do_not() -> None:
    generator = np.random.default_rng(0)
    logprobs = generator.normal(-2, 1, 200)
    choices = generator.integers(0, 4, 200)
    moved = choices.copy()
    moved[:30] = (moved[:30] + 1) % 4
    lower = logprobs - 0.1 + generator.normal(0, 0.05, 200)
    pair = {
        "a": result("bf16-gemm", BASE, choices=choices.tolist(), logprobs=logprobs.tolist()),
        "b": result("nvfp4", BASE, choices=moved.tolist(), logprobs=lower.tolist()),
    }
    comparison = compare_results(pair)
    delta = only(comparison)
    assert delta.verdict == SAME and delta.same_answer == 170 / 200
    assert delta.logprob is not None and delta.perplexity_ratio is not None
    assert delta.logprob.value == pytest.approx(float((lower - logprobs).mean()))
    assert delta.logprob.low < -0.09 and delta.logprob.high < -0.08
    assert delta.perplexity_ratio.value == pytest.approx(np.exp(-delta.logprob.value))
    assert 1.08 < delta.perplexity_ratio.low < delta.perplexity_ratio.high < 1.13
    plain = only(compare_results({"a": result("bf16-gemm", BASE), "b": result("nvfp4", BASE)}))
    assert plain.same_answer is plain.logprob is plain.perplexity_ratio is None, "not recorded is not the same as equal"


def text_result(precision: str, shift: float) -> EvalResult:
    generator = np.random.default_rng(0)
    words = generator.integers(100, 1000, 60)
    samples = tuple(
        Sample("wiki", "bits_per_byte", str(i), 1.0, {"words": int(n)}, logprob=float(-n * (3 + shift + i / 600)))
        for i, n in enumerate(words)
    )
    perplexity = float(np.exp(-sum(s.logprob or 0 for s in samples) / words.sum()))
    scores = (
        Score("wiki", "bits_per_byte", 1.0, None, 60, False),
        Score("wiki", "word_perplexity", perplexity, None, 60, False),
    )
    return EvalResult("s", precision, "reference", True, "c", scores, samples=samples)


def test_perplexities_of_running_text_are_compared_as_ratios() -> None:
    comparison = compare_results({"a": text_result("bf16-gemm", 0.0), "b": text_result("nvfp4", 0.02)})
    (one,) = comparison.perplexities
    assert one.metric == "word_perplexity" and one.ratio == pytest.approx(np.exp(0.02))
    assert one.interval is not None
    assert (one.interval.low, one.interval.value, one.interval.high) == pytest.approx([np.exp(0.02)] * 3)


def seeds(name: str, rate: float, count: int, tmp_path: Path) -> list[Path]:
    generator = np.random.default_rng([len(name), count])
    paths = []
    for seed in range(count):
        chance = np.linspace(0, 1, 400) ** (0.5 / rate)
        values = (generator.random(400) < chance).astype(float).tolist()
        written = result(name, values, choices=[int(v) for v in values], checkpoint=f"{name}{seed}")
        paths.append(written.write(tmp_path / name / f"seed{seed}" / "eval" / "sft.json"))
    return paths


def test_arms_of_several_seeds(tmp_path: Path) -> None:
    arms = {
        "bf16": seeds("bf16-gemm", 0.5, 3, tmp_path),
        "nvfp4": seeds("nvfp4", 0.5, 3, tmp_path),
        "bad": [path.parent.parent for path in seeds("mxfp8", 0.2, 2, tmp_path)],
    }
    comparison = compare([], arms=arms, baseline="bf16")
    same, worse = comparison.rows[0].deltas
    assert (same.run, same.test, same.verdict) == ("nvfp4", "t over seeds", WITHIN_NOISE)
    assert worse.run == "bad" and worse.verdict.startswith("worse")
    assert any("two seeds of bf16 give one answer" in note for note in comparison.notes)
    assert not any("luck of a training seed" in note for note in comparison.notes)
    assert [label for label, _ in comparison.sources] == ["bf16"] * 3 + ["nvfp4"] * 3 + ["bad"] * 2
    single = compare([arms["bf16"][0], arms["nvfp4"][0]])
    assert any("luck of a training seed" in note for note in single.notes)
    with pytest.raises(UserError, match="arm 'x' has results of precision bf16-gemm, nvfp4"):
        compare([arms["bf16"][1]], arms={"x": [arms["bf16"][0], arms["nvfp4"][0]]})
    with pytest.raises(UserError, match="given twice"):
        compare([arms["bf16"][0]], arms={"x": arms["bf16"]})


def test_what_makes_scores_differ_besides_the_run_is_said() -> None:
    a = result("bf16-gemm", BASE, versions={"torch": "2.11"}, hardware="H200")
    b = result("nvfp4", BASE, prompt="q", version="2", versions={"torch": "2.13"}, hardware="CPU")
    notes = " ".join(compare_results({"a": a, "b": b}).notes)
    for words in (
        "different prompts on 200 of 200",
        "version 2 of the task in b, 1 in a",
        "torch 2.13",
        "CPU, a on H2",
    ):
        assert words in notes


@pytest.mark.parametrize("values", [(1.0, 0.0), (1.5, 0.25)], ids=["right or wrong", "any score"])
@pytest.mark.parametrize("seeds", [(3, 2), (3, 1), (2, 2)], ids=str)
def test_one_document_in_several_seeds_decides_nothing(values: tuple[float, float], seeds: tuple[int, int]) -> None:
    arms = {
        name: [result("bf16-gemm", [value], logprobs=[-value])] * count
        for name, value, count in zip("ab", values, seeds, strict=True)
    }
    delta = only(compare_results(arms))
    assert (delta.delta, delta.p, delta.verdict) == (values[1] - values[0], 1.0, WITHIN_NOISE)
    assert delta.logprob is not None and delta.logprob.value == values[0] - values[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": float("nan")}, "b: document doc1 of word exact_match has score nan .*need numbers"),
        ({"value": float("inf")}, "score inf"),
        ({"logprob": float("nan")}, "log-likelihood nan"),
        ({"weight": 0.0}, "weight 0.0: need one above 0"),
    ],
    ids=str,
)
def test_what_is_no_number_gets_no_verdict(fields: dict[str, float], message: str) -> None:
    good = result("bf16-gemm", [1.0, 0.0, 0.5])
    first, second, third = good.samples
    bad = replace(good, samples=(first, replace(second, **fields), third))
    with pytest.raises(UserError, match=message):
        compare_results({"a": good, "b": bad})

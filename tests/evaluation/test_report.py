"""A report of a synthetic run folder: every number is where the data put it, and what is missing is said."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.plots import reward_plot
from lightning_nvfp4.evaluation.report import write_report
from lightning_nvfp4.evaluation.report_data import collect
from lightning_nvfp4.evaluation.results import EvalResult, Sample, Score

ARMS = {"nvfp4-hybrid": 1.02, "mxfp8": 1.005, "bf16-gemm": 1.0}
NATIVE = {"bf16-gemm"}


def metrics(path: Path, column: str, values: np.ndarray, first: int = 0, val: float | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"step,{column},val/loss"] + [f"{first + i},{v}," for i, v in enumerate(values)]
    if val is not None:
        lines.append(f"{first + len(values) - 1},,{val}")
    path.write_text("\n".join(lines) + "\n")


def evaluation(arm: str, rate: float, seed: int) -> EvalResult:
    generator = np.random.default_rng(seed)
    tasks = {"word": "exact_match", "choice_seen": "acc", "choice_heldout": "acc", "code": "pass_at_1"}
    scores, samples = [], []
    for task, metric in tasks.items():
        values = (generator.random(200) < rate).astype(float).tolist()
        part = [Sample(task, metric, f"{task}{i}", v) for i, v in enumerate(values)]
        samples += part
        mean = sum(values) / 200
        scores.append(Score(task, metric, mean, (mean * (1 - mean) / 199) ** 0.5, 200, version="1.0"))
    return EvalResult(
        "embedded", arm, "reference", arm in NATIVE, "c", tuple(scores), samples=tuple(samples), hardware="CPU test",
        date="2030-01-02T03:04:05+00:00", versions={"torch": "2.13.0"}, seeds={"documents": 0},
    )  # fmt: skip


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    steps = np.arange(400)
    noise = np.random.default_rng(0).normal(scale=0.03, size=400)
    for number, (arm, factor) in enumerate(ARMS.items()):
        base = 1.4 + 5.5 * np.exp(-steps / 60) + noise
        metrics(tmp_path / arm / "pretrain" / "metrics.csv", "train/loss", factor * base, 0, factor * 1.5)
        metrics(
            tmp_path / arm / "decay" / "metrics.csv", "train/loss", factor * (1.4 - 0.003 * steps[:150]), 400, factor
        )
        metrics(tmp_path / arm / "sft" / "metrics.csv", "train/loss", factor * (0.1 + 3 * np.exp(-steps[:300] / 40)))
        reward = 0.55 + 0.35 * (1 - np.exp(-steps[:40] / 12)) + noise[:40]
        metrics(tmp_path / arm / "rl" / "metrics.csv", "rl/reward", reward)
        for stage, rate in (("decay", 0.05), ("sft", 0.6), ("rl", 0.7)):
            result = evaluation(arm, rate - (0.25 if arm == "nvfp4-hybrid" and stage == "rl" else 0), number)
            result.write(tmp_path / arm / "eval" / f"{stage}.json")
    return tmp_path


class Checker(HTMLParser):
    """Collects what a page loads, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.loads.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "img", "link"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_says_what_the_data_say(folder: Path) -> None:
    page = write_report(folder, notes=["Most of the RL gain is choosing the verifiable form <of> an answer."])
    assert page == folder / "report.html"
    content = json.loads((folder / "report.json").read_text())
    assert content["baseline"] == "bf16-gemm" and content["missing"] == []
    for arm, factor in ARMS.items():
        assert content["losses"][arm]["pretrain"]["final"] > 0
        if arm != "bf16-gemm":
            for stage in ("pretrain", "decay", "sft"):
                assert content["loss_gaps"][arm][stage]["final"] == pytest.approx(factor - 1)
            assert content["loss_gaps"][arm]["pretrain"]["validation"] == pytest.approx(factor - 1)
    reward = content["rewards"]["mxfp8"]
    assert reward["last"] - reward["first"] > 0.15
    verdicts = {
        (row["task"], delta["run"]): delta["verdict"]
        for row in content["comparisons"]["rl"]["bf16-gemm"]["rows"]
        for delta in row["deltas"]
    }
    assert verdicts["word", "nvfp4-hybrid"].startswith("worse by")
    assert set(content["comparisons"]["rl"]) == {"bf16-gemm", "mxfp8"}
    text = (folder / "report.md").read_text()
    assert "| nvfp4-hybrid | +2.00 % |" in text
    assert "Emulated here: mxfp8, nvfp4-hybrid." in text
    assert "Most of the RL gain is choosing" in text


def test_the_page_stands_alone(folder: Path) -> None:
    page = write_report(folder, notes=["a <b> & c"]).read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.loads == [] and checker.open == []
    assert page.count("<svg") == 3 and "a &lt;b&gt; &amp; c" in page
    assert not re.search(r"tokens per second|tokens/s|steps/s", page), "emulated runs show no speed"
    assert 'name="viewport"' in page


def test_the_same_data_give_the_same_plots(folder: Path) -> None:
    run = collect(folder)
    assert reward_plot(run) == reward_plot(run)


def test_what_is_missing_is_shown(folder: Path) -> None:
    for name in ("mxfp8/rl/metrics.csv", "mxfp8/eval/rl.json", "nvfp4-hybrid/decay/metrics.csv"):
        (folder / name).unlink()
    (folder / "pipeline.json").write_text(
        json.dumps({f"stages.{s}.name": s for s in ("pretrain", "decay", "sft", "rl")})
    )
    (folder / "fp8").mkdir()
    (folder / "fp8" / "job.json").write_text("{}")
    page = write_report(folder).read_text()
    content = json.loads((folder / "report.json").read_text())
    assert content["arms"] == ["fp8", "mxfp8", "nvfp4-hybrid", "bf16-gemm"]
    for line in (
        "mxfp8: stage rl was not run.",
        "mxfp8: stage rl was not evaluated.",
        "nvfp4-hybrid: stage decay was not run.",
        "fp8: stage pretrain was not run.",
        "mxfp8: stage pretrain has not finished.",
    ):
        assert line in content["missing"]
        assert f"Missing: {line}" in page
    assert content["rewards"]["mxfp8"] is None
    assert '<td class="quiet">missing</td>' in page


def test_other_documents_are_said_and_not_compared(folder: Path) -> None:
    path = folder / "mxfp8" / "eval" / "rl.samples.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")
    run = collect(folder)
    assert any("scored different documents" in line for line in run.missing)
    assert ("rl", "bf16-gemm") not in run.comparisons and ("sft", "bf16-gemm") in run.comparisons


def test_errors(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="give the folder of a pipeline"):
        write_report(tmp_path / "empty")
    with pytest.raises(UserError, match="baseline 'fp8' is not among its arms"):
        write_report(folder, baseline="fp8")
    assert not (folder / "report.html").exists()

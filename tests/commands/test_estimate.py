"""`nvfp4 estimate`: what it prints and writes, and that docs/estimate.md holds what it writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lightning_nvfp4 import cli
from lightning_nvfp4.estimate.parts import PARTS

_TINY = ["estimate", "--config", "recipes/model/tiny-moe.yaml", "--hardware", "gb300"]


def test_tables_say_that_they_are_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(_TINY) == 0
    said = capsys.readouterr().out
    for part in ("A model on paper", "te-today", "fused", "mxfp8", "bf16-gemm", "nvfp4-hybrid + s2f6 wire"):
        assert part in said
    for title in ("Share of each part, pretraining", "Share of each part, reinforcement", "claim needs"):
        assert title in said


def test_json_parts_sum_to_one_for_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*_TINY, "--codec", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "model on paper" in found["notice"]
    shares: dict[tuple[str, ...], dict[str, float]] = {}
    for row in found["parts"]:
        arm = tuple(row[key] for key in ("gpu", "stack", "precision", "workload"))
        shares.setdefault(arm, {})[row["part"]] = row["share"]
    assert len(shares) == 2 * 3 * 2  # stacks, precisions, workloads
    assert all(set(parts) == set(PARTS) and sum(parts.values()) == pytest.approx(1) for parts in shares.values())
    assert {claim["pretraining"]["claimed"] for claim in found["claims"]} == {0.08}
    assert {claim["rl"]["claimed"] for claim in found["claims"]} == {0.20}


def test_files_by_their_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.csv", "a.json", "a.md"):
        assert cli.main([*_TINY, "--precision", "nvfp4", "--out", str(tmp_path / name)]) == 0
        assert f"wrote {tmp_path / name}" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert {row["part"] for row in rows} == set(PARTS)
    assert json.loads((tmp_path / "a.json").read_text())["parts"][0]["gpu"] == rows[0]["gpu"] == "GB300"
    assert "| GB300 | fused | nvfp4 |" in (tmp_path / "a.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.json", "a.md"]


def test_hardware_without_mxfp8_is_compared_with_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*_TINY[:-1], "h200", "--json"]) == 0
    arms = {row["precision"] for row in json.loads(capsys.readouterr().out)["parts"]}
    assert arms == {"bf16-gemm", "fp8", "nvfp4-hybrid", "nvfp4-hybrid + s2f6 wire"}


_WRONG = {
    "no configuration": (["estimate"], ["--config is missing", "recipes/model/qwen3-30b-a3b.yaml"]),
    "unknown hardware": ([*_TINY[:-1], "gb30"], ["recipes/hardware/gb30.yaml", "recipes/hardware/gb300.yaml"]),
    "bad hardware": ([*_TINY[:-1], "mine.yaml"], ["mine.yaml: memory_tb_s = 0 must be a number above 0", "TB/s"]),
    "suffix": ([*_TINY, "--out", "a.txt"], ["'a.txt'", ".csv, .json, .md"]),
    "codec": ([*_TINY, "--codec", "zip"], ["zip", "s2f6"]),
    "precision": ([*_TINY, "--precision", "nvpf4"], ["'nvpf4'", "'nvfp4'"]),
}


@pytest.mark.parametrize("case", _WRONG)
def test_mistakes_name_value_rule_and_cure(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    text = (root / "recipes/hardware/gb300.yaml").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace("memory_tb_s: 8.0", "memory_tb_s: 0"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words, parts = _WRONG[case]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


_DOCUMENTED = (
    ["--config", "recipes/model/qwen3-30b-a3b.yaml"],
    [
        "--config",
        "recipes/model/nemotron-nano-12b.yaml",
        "--hardware",
        "gb300",
        "--hardware",
        "b200",
        "--codec",
        "none",
    ],
    ["--validate"],
)


@pytest.mark.parametrize("words", _DOCUMENTED, ids=lambda words: words[-1])
def test_the_documentation_holds_the_tables_of_the_command(words: list[str], tmp_path: Path, root: Path) -> None:
    document = (root / "docs/estimate.md").read_text(encoding="utf-8")
    assert f"nvfp4 estimate {' '.join(words)}" in document
    assert cli.main(["estimate", *words, "--out", str(tmp_path / "a.md")]) == 0
    missing = [line for line in (tmp_path / "a.md").read_text(encoding="utf-8").splitlines() if line not in document]
    assert not missing, "write docs/estimate.md again: nvfp4 estimate ... --out part.md"


def test_published_figures_are_set_beside_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "--validate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["published"]
    gains = {(row["name"], row["gpu"], row["candidate"]): row for row in found if row["published"]["gain"] is not None}
    # Figures as published; a change of the file has to be one of its source.
    assert gains["Nemotron 3 Super pretraining", "gb300", "nemotron-nvfp4"]["published"]["gain"] == 0.039
    assert gains["DeepSeek-V3 671B pretraining", "gb300", "ffn-nvfp4"]["published"]["gain"] == 0.138
    for row in gains.values():
        said, tokens = row["published"], (row["published"]["baseline_tokens"], row["published"]["candidate_tokens"])
        if None not in tokens:
            assert tokens[1] / tokens[0] - 1 == pytest.approx(said["gain"], abs=0.006)

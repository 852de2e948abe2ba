"""The driver that compares arms of RL: its intervals, and that it reads runs as they are, finished or not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_FOLDER))
        spec = importlib.util.spec_from_file_location("rl_compare", _FOLDER / "rl_compare.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["rl_compare"] = module
        spec.loader.exec_module(module)
    return module


def test_intervals_are_those_of_the_textbook(driver: ModuleType) -> None:
    low, high = driver.t_interval([0.1, 0.2, 0.3, 0.4, 0.5])
    half = 2.7764451 * 0.15811388 / 5**0.5
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half))
    low, high = driver.welch_interval([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    half = driver.stats.t.ppf(0.975, (1 / 3 + 4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)) * (5 / 3) ** 0.5
    assert (low, high) == pytest.approx((-2 - half, -2 + half))


def test_a_report_of_runs_that_are_there(driver: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    for arm, shift in (("bf16-gemm", 0.0), ("nvfp4-hybrid", 0.01)):
        for seed in range(3):
            folder = tmp_path / arm / f"seed-{seed}"
            (folder / "hf").mkdir(parents=True)
            if seed < 2 or arm == "bf16-gemm":
                (folder / "hf" / "config.json").write_text("{}")
            rows = [f"{s},{0.2 + 0.1 * s + shift * (1 + seed)},0.02,3.0" for s in range(6)]
            (folder / "metrics.csv").write_text("\n".join(["step,rl/reward,rl/logp_diff,rl/entropy", *rows]) + "\n")
            (folder / "timings.csv").write_text("step,time/step,time/rollout_share\n0,2.0,0.75\n")
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--seeds", "0-2", "--final", "2", "--report-only"])
    assert driver.main() == 1  # one run has not come to its end
    text = (tmp_path / "report.md").read_text()
    assert "| nvfp4-hybrid | 2 | 6, unfinished | 0.230 | 0.680 | +0.450 | 0.0200 (0.0200) | - | 0.750 | 2.000 |" in text
    assert "**nvfp4-hybrid - bf16-gemm**, 2 seeds finished in both: +0.0150" in text and "[-0.0485, +0.0785]" in text
    assert "It contains 0; its centre is within 0.05" in text and (tmp_path / "curves.png").stat().st_size > 1000
    curves = (tmp_path / "curves.csv").read_text().splitlines()
    assert len(curves) == 1 + 6 * 6 and curves[0].startswith("arm,seed,step,reward,logp_diff,entropy,time_step")


def test_a_run_of_other_settings_is_not_taken_for_one_of_these(driver: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """Nor gone on with. What counts is what the inputs hold, not where they lie."""
    begun: list[list[str]] = []
    monkeypatch.setattr(driver, "work", lambda missing, *_: begun.append([run.arm for run in missing]))
    for folder in ("start", "moved"):
        (tmp_path / folder / "hf").mkdir(parents=True)
        (tmp_path / folder / "hf" / "model.safetensors").write_text("weights")
    out = tmp_path / "out"

    def main(start: str, *overrides: str) -> None:
        words = ["x", "--out", str(out), "--arms", "bf16-gemm,mxfp8", "--seeds", "0", "--start", str(tmp_path / start)]
        monkeypatch.setattr(sys, "argv", [*words, *overrides])
        driver.main()

    main("start", "trainer.max_steps=3")
    (out / "bf16-gemm" / "seed-0" / "hf").mkdir()
    (out / "bf16-gemm" / "seed-0" / "hf" / "config.json").write_text("{}")
    main("moved", "trainer.max_steps=3")
    assert begun == [["bf16-gemm", "mxfp8"], ["mxfp8"]]
    with pytest.raises(SystemExit, match="bf16-gemm/seed-0 holds a run of other overrides .*give another --out"):
        main("start", "trainer.max_steps=4")
    (tmp_path / "start" / "hf" / "model.safetensors").write_text("others")
    with pytest.raises(SystemExit, match="holds a run of other inputs"):
        main("start", "trainer.max_steps=3")
    assert len(begun) == 2

"""`metrics.csv` of a resumed run."""

from __future__ import annotations

from pathlib import Path

from lightning_nvfp4.commands.metrics_log import RunCSVLogger


def _log(folder: Path, steps: range, offset: float = 0.0, **more: float) -> None:
    logger = RunCSVLogger(folder)
    for step in steps:
        logger.log_metrics({"loss": step + offset, **more}, step)
    logger.finalize("success")


def test_steps_taken_again_replace_their_rows(tmp_path: Path) -> None:
    _log(tmp_path, range(0, 6))
    _log(tmp_path, range(4, 8), 0.5)
    rows = (tmp_path / "metrics.csv").read_text(encoding="utf-8").split()
    assert rows == ["loss,step", "0.0,0", "1.0,1", "2.0,2", "3.0,3", "4.5,4", "5.5,5", "6.5,6", "7.5,7"]


def test_a_run_that_starts_anew_replaces_the_file(tmp_path: Path) -> None:
    _log(tmp_path, range(0, 3))
    _log(tmp_path, range(0, 1), 9.0)
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").split() == ["loss,step", "9.0,0"]


def test_half_a_line_is_dropped_and_new_columns_widen_the_file(tmp_path: Path) -> None:
    _log(tmp_path, range(0, 2))
    with (tmp_path / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("7.0")
    _log(tmp_path, range(2, 3), reward=1.0)
    rows = (tmp_path / "metrics.csv").read_text(encoding="utf-8").split()
    assert rows == ["loss,reward,step", "0.0,,0", "1.0,,1", "2.0,1.0,2"]


def test_every_row_is_on_disk_at_once(tmp_path: Path) -> None:
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").split() == ["loss,step", "1.0,0"]

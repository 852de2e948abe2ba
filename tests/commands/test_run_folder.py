"""The folder of a fit: one writer at a time, and nothing left of a run that was refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_nvfp4.commands.run_folder import RunFolder
from lightning_nvfp4.errors import UserError


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with RunFolder() as first:
        first.enter(tmp_path)
        with pytest.raises(UserError, match="another fit is writing it"), RunFolder() as second:
            second.enter(tmp_path)
    with RunFolder() as third:
        third.enter(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_refused_run_made_is_removed_with_the_folders_above_it(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "run"
    with pytest.raises(UserError), RunFolder() as folder:
        folder.enter(root)
        (root / "events").write_text("")
        raise UserError("no data")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_begun_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with pytest.raises(UserError), RunFolder() as folder:
        folder.enter(root)
        (root / "metrics.csv").write_text("step\n")
        raise UserError("the loss is not finite")
    assert (root / "metrics.csv").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for root in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with (
            pytest.raises(UserError, match="default_root_dir.*cannot be written.*another folder"),
            RunFolder() as folder,
        ):
            folder.enter(root)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

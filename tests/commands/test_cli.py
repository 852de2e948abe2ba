"""The dispatcher, where configurations are found, and what `doctor` says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import lightning_nvfp4
from lightning_nvfp4 import cli
from lightning_nvfp4.commands import doctor, paths
from lightning_nvfp4.recipe import PRESETS


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", "pipeline", "eval", "compare", "plan", "estimate", "doctor"):
        assert f"\n  {name} " in said
    assert cli.main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"nvfp4 {lightning_nvfp4.__version__}\n"


@pytest.mark.parametrize("name", cli._OWN)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(cli._OWN[name][0]).run)
    assert cli.main([name, "--help"]) == 0
    assert f"usage: nvfp4 {name}" in capsys.readouterr().out


def test_a_file_in_the_working_directory_comes_before_the_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = paths.find_config("recipes/sft.yaml")
    assert packaged.is_absolute()
    own = tmp_path / "recipes" / "sft.yaml"
    own.parent.mkdir()
    own.write_text("{}", encoding="utf-8")
    assert paths.find_config("recipes/sft.yaml").resolve() == own.resolve()


def test_the_copy_in_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = tmp_path / "_configs"
    (configs / "eval").mkdir(parents=True)
    (configs / "eval" / "mine.yaml").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(paths, "_ROOTS", (configs,))
    assert paths.find_config("eval/mine.yaml") == configs / "eval" / "mine.yaml"
    assert paths.packaged_configs() == ["eval/mine.yaml"]


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["presets"]) == set(PRESETS)
    assert all(choice["backend"] and choice["reason"] for choice in report["presets"].values())
    assert report["versions"]["torch"]


def test_doctor_names_a_conflict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["torch>=99", "no-such-package", "x; extra == 'dev'"])
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "pip install 'torch>=99'" in said
    assert "pip install 'no-such-package'" in said

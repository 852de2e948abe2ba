"""What this machine can run, and why not."""

from pathlib import Path

import pytest

from lightning_nvfp4 import PRESETS, capability
from lightning_nvfp4.capability import cache_folder
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops.reference.native import kernel_folder


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_NVFP4_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("LIGHTNING_NVFP4_CACHE")
    assert cache_folder() == Path("/x/lightning_nvfp4")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "lightning_nvfp4"
    monkeypatch.setenv("HOME", "")
    assert cache_folder().name.startswith("lightning_nvfp4-")


def test_kernels_are_not_loaded_from_a_folder_that_others_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_NVFP4_CACHE", str(tmp_path))
    folder = kernel_folder()
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    with pytest.raises(OSError, match="open to others"):
        kernel_folder()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_backend_and_a_reason(preset: str) -> None:
    choice = capability.backend_for(preset)
    assert choice.backend == "reference" and choice.reason


@pytest.mark.parametrize(
    ("name", "words"), [("cuda", "'cuda' is unknown"), ("te", "cannot run"), ("triton", "cannot run")]
)
def test_a_backend_that_cannot_run_is_refused(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "has_triton", lambda: False)
    with pytest.raises(UserError, match=words):
        capability.require(name)


def test_the_report_is_plain_data_about_this_machine() -> None:
    report = capability.report()
    assert report["versions"]["torch"] and report["devices"][0] == "cpu"
    assert set(report["presets"]) == set(PRESETS)


@pytest.mark.parametrize(
    ("cuda", "triton", "expected"),
    [(False, False, "reference"), (False, True, "reference"), (True, False, "reference"), (True, True, "triton")],
)
def test_auto_is_triton_on_cuda_and_the_reference_elsewhere(
    cuda: bool, triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capability.torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(capability, "has_triton", lambda: triton)
    assert capability.resolve("auto") == expected
    assert capability.resolve("reference") == "reference"

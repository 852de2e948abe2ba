"""What this machine can run, and why not."""

from pathlib import Path

import pytest

from lightning_nvfp4 import PRESETS, capability
from lightning_nvfp4.capability import Machine, cache_folder
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
    [(None, False, "reference"), (None, True, "reference"), ((9, 0), False, "reference"), ((9, 0), True, "triton")],
)
def test_auto_is_triton_on_cuda_and_the_reference_elsewhere(
    cuda: tuple[int, int] | None, triton: bool, expected: str
) -> None:
    machine = Machine(cuda, None, triton)
    assert capability.resolve("auto", machine) == expected
    assert capability.resolve("reference", machine) == "reference"


HOPPER, B200, B300, RTX, AMPERE = (9, 0), (10, 0), (10, 3), (12, 0), (8, 0)


@pytest.mark.parametrize(
    ("cuda", "native"),
    [
        (HOPPER, {"fp8"}),
        (B200, {"fp8", "mxfp8", "nvfp4", "nvfp4-hybrid"}),
        (B300, {"fp8", "mxfp8", "nvfp4", "nvfp4-hybrid"}),
        (RTX, {"nvfp4"}),
        (AMPERE, set()),
        (None, set()),
    ],
)
def test_which_presets_transformer_engine_runs_where(cuda: tuple[int, int] | None, native: set[str]) -> None:
    machine = Machine(cuda, "2.20.2")
    for preset, recipe in PRESETS.items():
        choice = capability.choose("auto", recipe, machine)
        assert (choice.backend == "te") == (preset in native)
        assert choice.native == (preset in native or preset == "bf16-gemm")
        assert choice.reason
        if preset != "bf16-gemm" and preset not in native:
            with pytest.raises(UserError, match="cannot run"):
                capability.choose("te", recipe, machine)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(B200, None), "not installed"),
        (Machine(B200, "2.18.0"), "older than 2.19"),
        (Machine(None, "2.20.2"), "no CUDA device"),
        (Machine(RTX, "2.20.2"), "compute capability 12.0, where Transformer Engine has no mxfp8 GEMM"),
        (Machine(HOPPER, "2.20.2"), r"it needs 10.0 to below 12.0"),
    ],
)
def test_transformer_engine_is_refused_with_the_reason(machine: Machine, words: str) -> None:
    with pytest.raises(UserError, match=f"{words}.*backend='auto'"):
        capability.choose("te", PRESETS["mxfp8"], machine)
    choice = capability.choose("auto", PRESETS["mxfp8"], machine)
    assert not choice.native and choice.reason.startswith("emulated")


def test_a_variable_that_changes_te_numerics_stops_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in capability._TE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    capability.require_te_environment()
    for name, harmless in capability._TE_VARIABLES.items():
        for value in harmless:
            monkeypatch.setenv(name, value)
            capability.require_te_environment()
        monkeypatch.setenv(name, "1")
        with pytest.raises(UserError, match=f"unset {name},"):
            capability.require_te_environment()
        monkeypatch.delenv(name)

"""Loads the golden files: values computed by other people's code, where they lie beside the repository."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from lightning_nvfp4.ops.reference import fast, native

Golden = Callable[[str], dict[str, Tensor]]


@cache
def _load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.fixture(scope="session")
def golden(shared: Path) -> Golden:
    """Return a golden file's tensors by its name."""
    return lambda name: _load(shared / "golden" / f"{name}.safetensors")


@pytest.fixture(autouse=True, params=["definition", "compiled"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the torch definition and its compiled kernels to the same values."""
    if request.param == "definition":
        monkeypatch.setattr(fast, "kernels", lambda: None)
    elif native.library() is None:
        pytest.skip("there is no C compiler")

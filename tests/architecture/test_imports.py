"""What importing the package may load, shown in a fresh process; and that the check can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("transformer_engine", "lm_eval", "datasets", "tensorboard", "lightning_nvfp4.ops.triton")


def _loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    loaded = _loaded("import lightning_nvfp4")
    assert "lightning_nvfp4.recipe" in loaded
    assert not loaded.intersection(_HEAVY)
    assert not any(name.startswith(("lightning_nvfp4.lm", "lightning_nvfp4.evaluation")) for name in loaded)


def test_the_check_would_notice() -> None:
    assert "datasets" in _loaded("import datasets")


@pytest.mark.parametrize("module", ["formats", "errors"])
def test_formats_and_errors_need_the_standard_library_only(module: str) -> None:
    # The package's own __init__ registers with Lightning; the layer below is loaded without it.
    statement = (
        "import importlib.util, pathlib, sys, types\n"
        "root = pathlib.Path(importlib.util.find_spec('lightning_nvfp4').submodule_search_locations[0])\n"
        "package = types.ModuleType('lightning_nvfp4'); package.__path__ = [str(root)]\n"
        "sys.modules['lightning_nvfp4'] = package\n"
        f"import lightning_nvfp4.{module}"
    )
    assert not _loaded(statement).intersection({"torch", "numpy", "lightning", "transformers"})

"""What importing the package may load, shown in a fresh process; and that the check can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("torch", "lightning", "transformers", "transformer_engine", "lm_eval", "datasets", "tensorboard")


def _loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    loaded = _loaded("import lightning_nvfp4")
    assert not loaded.intersection(_HEAVY)
    assert {name for name in loaded if name.startswith("lightning_nvfp4.")} == {"lightning_nvfp4.after_import"}


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_nvfp4, lightning.pytorch as lightning",
        "import pytorch_lightning as lightning, lightning_nvfp4",
        "import lightning_nvfp4\nlightning_nvfp4.BlockScaledPrecision\nimport lightning",
        "import lightning_nvfp4.callbacks, lightning",
    ],
)
def test_the_names_are_registered_in_whichever_order_packages_are_imported(imports: str) -> None:
    quiet = "accelerator='cpu', logger=False, enable_checkpointing=False"
    _loaded(f"{imports}\nassert lightning.Trainer(precision='nvfp4-hybrid', {quiet}).precision == 'nvfp4-hybrid'")


def test_the_check_would_notice() -> None:
    assert "datasets" in _loaded("import datasets")


@pytest.mark.parametrize("module", ["formats", "errors"])
def test_formats_and_errors_need_the_standard_library_only(module: str) -> None:
    assert not _loaded(f"import lightning_nvfp4.{module}").intersection({"torch", "numpy", "lightning", "transformers"})

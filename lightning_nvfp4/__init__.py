"""NVFP4 training for PyTorch Lightning.

Importing the package makes the precision names ``nvfp4-hybrid``, ``nvfp4``, ``mxfp8``, ``fp8`` and ``bf16-gemm`` known
to Trainer and Fabric, and the strategy ``expert-parallel`` to Trainer, in whichever order it and Lightning are
imported. It loads no kernel, no Transformer Engine and no Lightning; the public names load what they need when they are
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_nvfp4.after_import import after_import

if TYPE_CHECKING:
    from lightning_nvfp4.callbacks import NonfiniteGuard, NumericsMonitor, PrecisionSchedule
    from lightning_nvfp4.comm.codec import Codec, register_codec
    from lightning_nvfp4.nn.convert import ConversionReport, convert, restore
    from lightning_nvfp4.nn.inference import cached_weights, inference
    from lightning_nvfp4.ops import QuantizedTensor, quantize
    from lightning_nvfp4.plugins.precision import BlockScaledPrecision
    from lightning_nvfp4.recipe import PRESETS, GemmRecipe, QuantSpec, Recipe, load_recipe
    from lightning_nvfp4.strategies import ExpertParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "BlockScaledPrecision",
    "Codec",
    "ConversionReport",
    "ExpertParallelStrategy",
    "GemmRecipe",
    "NonfiniteGuard",
    "NumericsMonitor",
    "PrecisionSchedule",
    "QuantSpec",
    "QuantizedTensor",
    "Recipe",
    "cached_weights",
    "convert",
    "inference",
    "load_recipe",
    "quantize",
    "register_codec",
    "restore",
]

_MODULES = {
    "callbacks": ("NonfiniteGuard", "NumericsMonitor", "PrecisionSchedule"),
    "comm.codec": ("Codec", "register_codec"),
    "nn.convert": ("ConversionReport", "convert", "restore"),
    "nn.inference": ("cached_weights", "inference"),
    "ops": ("QuantizedTensor", "quantize"),
    "plugins.precision": ("BlockScaledPrecision",),
    "recipe": ("PRESETS", "GemmRecipe", "QuantSpec", "Recipe", "load_recipe"),
    "strategies": ("ExpertParallelStrategy",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _registration(function: str) -> Any:
    def register() -> None:
        for part in ("plugins", "strategies"):
            getattr(importlib.import_module(f"lightning_nvfp4.{part}.register"), function, lambda: None)()

    return register


for _package in ("lightning", "pytorch_lightning", "lightning_fabric"):
    after_import(_package, _registration(f"register_{_package}"))

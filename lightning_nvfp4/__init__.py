"""NVFP4 training for PyTorch Lightning.

Importing the package registers the precision names ``nvfp4-hybrid``, ``nvfp4``, ``mxfp8``, ``fp8`` and ``bf16-gemm``
with Trainer and Fabric. It loads no kernel and no Transformer Engine.
"""

from lightning_nvfp4.callbacks import NonfiniteGuard, PrecisionSchedule
from lightning_nvfp4.nn.convert import ConversionReport, convert, restore
from lightning_nvfp4.nn.inference import cached_weights, inference
from lightning_nvfp4.ops import QuantizedTensor, quantize
from lightning_nvfp4.plugins.precision import BlockScaledPrecision
from lightning_nvfp4.plugins.register import register
from lightning_nvfp4.recipe import PRESETS, GemmRecipe, QuantSpec, Recipe, load_recipe

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "BlockScaledPrecision",
    "ConversionReport",
    "GemmRecipe",
    "NonfiniteGuard",
    "PrecisionSchedule",
    "QuantSpec",
    "QuantizedTensor",
    "Recipe",
    "cached_weights",
    "convert",
    "inference",
    "load_recipe",
    "quantize",
    "restore",
]

register()

"""What this machine and its packages can run, and why not; asked nowhere else.

Backends of the quantized GEMMs: ``reference`` (plain torch, any device, the executable definition of the numerics),
``triton`` (fused emulation on CUDA, the same bits) and ``te`` (Transformer Engine, native FP8 or FP4 tensor cores).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.recipe import PRESETS, Recipe

BACKENDS = ("auto", "reference", "triton", "te")
_TE_OLDEST = (2, 19)
# Format -> compute capabilities, from and below, whose tensor cores TE multiplies it on.
# Source: TransformerEngine 2.20, pytorch/quantization.py; block-scaled FP8 becomes MXFP8 on Blackwell (csrc/gemm.cpp).
_TE_DEVICES = {
    "fp8_block": ((9, 0), (12, 0)),
    "mxfp8": ((10, 0), (12, 0)),
    "nvfp4": ((10, 0), (13, 0)),
}
# Environment variable of TE that changes numerics -> the values under which it does not.
# Source: TransformerEngine 2.20, common/recipe/__init__.py, pytorch/csrc and common, which read the environment.
_TE_VARIABLES = {
    "NVTE_USE_FAST_MATH": ("0",),
    "NVTE_BACKWARD_OVERRIDE": (),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("0",),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("0",),
    "NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION": ("0",),
    "NVTE_NVFP4_DISABLE_RHT": ("0",),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ("0",),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("0",),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ("0",),
    "NVTE_NVFP4_4OVER6": ("none",),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("all",),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("MAE", "mae"),
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": ("0",),
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM": ("0",),
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM": ("0",),
    "NVTE_USE_CUTLASS_GROUPED_GEMM": ("0",),
    "NVTE_DEBUG": ("0",),
}


@dataclass(frozen=True)
class Machine:
    """What the choice of a backend depends on; any values can be given to ask what another machine would do.

    Attributes:
        compute_capability: (major, minor) of the CUDA device, ``None`` without one.
        te: version of Transformer Engine, ``None`` where it is not installed.
        triton: whether the Triton kernels can run.
        real: it is this machine, so TE itself may be asked.
    """

    compute_capability: tuple[int, int] | None
    te: str | None
    triton: bool = True
    real: bool = False


@dataclass(frozen=True)
class Choice:
    """The backend a preset would use here, whether it is native speed, and why."""

    backend: str
    native: bool
    reason: str


def this_machine(device: str | None = None) -> Machine:
    """Return what is here, without the GPU for a model that will run on another `device` (its type)."""
    cuda = device in (None, "cuda") and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else None
    version = _version("transformer-engine") if importlib.util.find_spec("transformer_engine") else None
    return Machine(capability, version, has_triton(), real=True)


def choose(backend: str, recipe: Recipe, machine: Machine | None = None) -> Choice:
    """Return the backend that runs a recipe here, or on another machine, with the reason in one line.

    Raises:
        UserError: an unknown backend, one that cannot run, or a variable in the environment that changes TE's numerics
            where TE would run.
    """
    machine = machine or this_machine()
    require(backend, machine)
    emulated = resolve(backend if backend != "te" else "auto", machine)
    if not recipe.formats():
        return Choice(emulated, True, "BF16 operands, FP32 accumulation on every device; nothing is quantized")
    if backend in ("auto", "te"):
        reason = te_uncovered(recipe.formats(), machine)
        if reason is None:
            if machine.real:
                require_te_environment()
            return Choice("te", True, f"Transformer Engine {machine.te} on compute capability {_text(machine)}")
        if backend == "te":
            raise UserError(
                f"backend='te' cannot run precision {recipe.name!r}: {reason}. Use backend='auto' (the same numerics)."
            )
        if machine.compute_capability is None:
            reason = "no CUDA device; same bits as on a GPU, at emulation speed"
        return Choice(emulated, False, f"emulated: {reason}")
    return Choice(emulated, False, f"emulated: backend={backend!r} was asked for")


def require(backend: str, machine: Machine | None = None) -> str:
    """Return `backend`, or raise with the reason it cannot run.

    Raises:
        UserError: an unknown backend, or one that this installation cannot run.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend in ("auto", "reference"):
        return backend
    machine = machine or this_machine()
    reason = te_uncovered((), machine) if backend == "te" else None
    if backend == "triton" and not machine.triton:
        missing = importlib.util.find_spec("triton") is None
        reason = "the package triton is not installed" if missing else "no CUDA device is visible"
    if reason:
        raise UserError(f"backend={backend!r} cannot run: {reason}. Use backend='auto' (the same numerics).")
    return backend


@functools.cache
def has_triton() -> bool:
    """Return whether the Triton kernels can run: on a CUDA device, or anywhere in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def resolve(backend: str, machine: Machine | None = None) -> str:
    """Return which emulation ``auto`` means: ``triton`` where a CUDA device is visible, else ``reference``."""
    if require(backend, machine) != "auto":
        return backend
    machine = machine or this_machine()
    return "triton" if machine.compute_capability and machine.triton else "reference"


def te_uncovered(formats: Iterable[str], machine: Machine | None = None) -> str | None:
    """Return why Transformer Engine cannot multiply these formats on a machine, or ``None``."""
    machine = machine or this_machine()
    if machine.te is None:
        return "the package transformer_engine is not installed (pip install 'lightning-nvfp4[te]')"
    if tuple(int(part) for part in machine.te.split(".")[:2]) < _TE_OLDEST:
        return f"transformer_engine {machine.te} is older than {'.'.join(map(str, _TE_OLDEST))}"
    if machine.compute_capability is None:
        return "no CUDA device is visible"
    for name in sorted(formats):
        if name not in _TE_DEVICES:
            return f"Transformer Engine has no {name} GEMM"
        first, end = _TE_DEVICES[name]
        if not first <= machine.compute_capability < end:
            what = f"compute capability {_text(machine)}, where Transformer Engine has no {name} GEMM"
            return f"{what} (it needs {first[0]}.{first[1]} to below {end[0]}.{end[1]})"
    return _te_refusal(tuple(sorted(formats))) if machine.real else None


@functools.cache
def _te_refusal(formats: tuple[str, ...]) -> str | None:
    """Ask Transformer Engine itself, by its features rather than by its version."""
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
    except Exception as error:  # a library that is missing or was built for another torch raises all kinds of errors
        return f"transformer_engine cannot be loaded ({' '.join(str(error).split())[:200]})"
    for module, names in (
        (te, ("Linear", "GroupedLinear", "autocast", "HybridQuantizer", "IdentityQuantizer", "DType", "MXFP8Tensor")),
        (recipes, ("CustomRecipe", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")),
    ):
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            return f"this transformer_engine has no {', '.join(missing)}: install 2.20"
    probes = {
        "fp8_block": "is_fp8_block_scaling_available",
        "mxfp8": "is_mxfp8_available",
        "nvfp4": "is_nvfp4_available",
    }
    for name in formats:
        runs, reason = getattr(te, probes[name])(return_reason=True)
        if not runs:
            return f"Transformer Engine says: {reason.rstrip('.')}"
    return None


def require_te_environment() -> None:
    """Refuse to run with a variable in the environment that changes Transformer Engine's numerics.

    Raises:
        UserError: one is set to more than its default.
    """
    for name, harmless in _TE_VARIABLES.items():
        value = os.environ.get(name)
        if value not in (None, "", *harmless):
            raise UserError(
                f"The environment variable {name} = {value!r} changes the numerics of Transformer Engine, which would "
                f"not be those of the recipe any more: unset {name}, and set the recipe's fields instead."
            )


def backend_for(preset: str) -> Choice:
    """Return the backend that ``backend="auto"`` gives `preset` on this machine, with the reason in one line."""
    if preset not in PRESETS:
        raise unknown("precision preset", preset, PRESETS)
    return choose("auto", PRESETS[preset])


def _text(machine: Machine) -> str:
    return ".".join(map(str, machine.compute_capability or ()))


def cache_folder() -> Path:
    """Return the folder for files that can be made again.

    The first of $LIGHTNING_NVFP4_CACHE, $XDG_CACHE_HOME/lightning_nvfp4, ~/.cache/lightning_nvfp4, and, where there is
    no writable home, a folder of this user's in the system's temporary folder.
    """
    if named := os.environ.get("LIGHTNING_NVFP4_CACHE"):
        return Path(named).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "lightning_nvfp4"
    home = os.environ.get("HOME")
    if home and os.access(home, os.W_OK):
        return Path(home) / ".cache" / "lightning_nvfp4"
    return Path(tempfile.gettempdir()) / f"lightning_nvfp4-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def c_compiler() -> str | None:
    """Return the C compiler that builds the CPU quantizers: $CC, else cc, gcc or clang on the path."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((path for path in map(shutil.which, names) if path), None)


@torch.compiler.assume_constant_result  # it cannot be traced, and a broken graph sums gradients in another order
def slow_bf16(device_type: str) -> bool:
    """Return whether BF16 products on such a device are slower than FP32 ones: a CPU without BF16 instructions."""
    return device_type == "cpu" and not _cpu_has_bf16()


@functools.cache
def _cpu_has_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def report() -> dict[str, Any]:
    """Return versions, devices and the choice for every preset, as plain data for ``nvfp4 doctor`` and run records."""
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "compiler": c_compiler(),
        "presets": {name: backend_for(name) for name in PRESETS},
    }


_PACKAGES = (
    "lightning-nvfp4",
    "torch",
    "lightning",
    "transformers",
    "transformer-engine",
    "triton",
    "torchmetrics",
    "lm-eval",
    "omegaconf",
    "jsonargparse",
    "datasets",
)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    cuda = [
        f"cuda:{i} {torch.cuda.get_device_name(i)} (sm_{''.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    ]
    return ["cpu", *cuda]

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_nvfp4.errors import UserError, unknown

BACKENDS = ("auto", "reference", "triton", "te")
# Compute capability (major, minor) from which tensor cores take the format natively.
# Source: PTX ISA 9.1, mma/tcgen05 operand types; Transformer Engine 2.20 support matrix.
_NATIVE_SINCE = {"bf16-gemm": (8, 0), "fp8": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0), "nvfp4-hybrid": (10, 0)}


@dataclass(frozen=True)
class Choice:
    """The backend a preset would use here, whether it is native speed, and why."""

    backend: str
    native: bool
    reason: str


def require(backend: str) -> str:
    """Return `backend`, or raise with the reason it cannot run.

    Raises:
        UserError: an unknown backend, or one that this installation cannot run.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend in ("auto", "reference") or (backend == "triton" and has_triton()):
        return backend
    raise UserError(f"backend={backend!r} cannot run: {why_not(backend)} Use backend='auto' (the same numerics).")


@functools.cache
def has_triton() -> bool:
    """Return whether the Triton kernels can run: on a CUDA device, or anywhere in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def resolve(backend: str) -> str:
    """Return what ``auto`` means on this machine: ``triton`` where a CUDA device is visible, else ``reference``."""
    if require(backend) != "auto":
        return backend
    return "triton" if torch.cuda.is_available() and has_triton() else "reference"


def why_not(backend: str) -> str:
    """Return the reason why `backend` cannot run here."""
    package = {"te": "transformer_engine", "triton": "triton"}[backend]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed."
    if not torch.cuda.is_available():
        return "no CUDA device is visible."
    return "this release has no kernels for it; see CHANGELOG.md."


def backend_for(preset: str) -> Choice:
    """Return the backend that ``backend="auto"`` gives `preset` on this machine, with the reason in one line."""
    if preset not in _NATIVE_SINCE:
        raise unknown("precision preset", preset, _NATIVE_SINCE)
    emulated = resolve("auto")
    if preset == "bf16-gemm":
        return Choice(emulated, True, "BF16 operands, FP32 accumulation on every device; nothing is quantized")
    major, minor = _NATIVE_SINCE[preset]
    if not torch.cuda.is_available():
        return Choice(emulated, False, "emulated: no CUDA device; same bits as on a GPU, at emulation speed")
    have = torch.cuda.get_device_capability()
    if have < (major, minor):
        return Choice(emulated, False, f"emulated: compute capability {have} is below {(major, minor)}")
    return Choice(emulated, False, f"emulated: {why_not('te')}")


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
        "presets": {name: backend_for(name) for name in _NATIVE_SINCE},
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

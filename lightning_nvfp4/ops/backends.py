"""Which backend works on a tensor: the named one, or the fastest that covers its device and format."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from lightning_nvfp4 import capability
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops.interface import Backend
from lightning_nvfp4.ops.reference import backend as reference
from lightning_nvfp4.recipe import QuantSpec

_kernels: Any = None
"""The package of Triton kernels, once `kernels` has loaded it."""


def kernels() -> Any:
    """Return `ops.triton.backend`, or ``None`` where Triton cannot run; conversion loads it ahead of any trace."""
    global _kernels
    if _kernels is None and not torch.compiler.is_compiling() and capability.has_triton():
        _kernels = importlib.import_module("lightning_nvfp4.ops.triton.backend")
    return _kernels


def has_kernels(x: Tensor, name: str) -> bool:
    """Return whether fused kernels, which know counts on the device only, work on x under a backend's name."""
    return (name == "triton" or (name == "auto" and x.is_cuda)) and kernels() is not None


def backend_for(x: Tensor, spec: QuantSpec, name: str = "auto") -> Backend:
    """Return the backend `name` for x, or the choice of ``auto``: ``triton`` on CUDA where it has kernels.

    All backends give the same bits.

    Raises:
        UserError: the backend named cannot work on this tensor in this format.
    """
    if name == "te":
        raise UserError(
            "backend='te' cannot run a quantizer by itself: Transformer Engine quantizes inside its layers. Use "
            "backend='auto', with whose bits a start-up test compares Transformer Engine's."
        )
    if not has_kernels(x, name):
        capability.require(name)
        return cast(Backend, reference)
    found = kernels()
    reason = found.uncovered(x, spec)
    if reason is None:
        return found
    if name == "auto":
        return cast(Backend, reference)
    raise UserError(f"backend='triton' cannot quantize this tensor: {reason}. Use backend='auto' or 'reference'.")

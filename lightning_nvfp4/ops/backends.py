"""Which backend works on a tensor: the named one, or the fastest that covers its device and format."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

from torch import Tensor

from lightning_nvfp4 import capability
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops.interface import Backend
from lightning_nvfp4.ops.reference import backend as reference
from lightning_nvfp4.recipe import QuantSpec


@functools.cache
def _triton() -> Any:
    return importlib.import_module("lightning_nvfp4.ops.triton.backend")


def backend_for(x: Tensor, spec: QuantSpec, name: str = "auto") -> Backend:
    """Return the backend `name` for x, or the choice of ``auto``: ``triton`` on CUDA where it has kernels.

    All backends give the same bits.

    Raises:
        UserError: the backend named cannot work on this tensor in this format.
    """
    name = capability.require(name)
    if name == "reference":
        return cast(Backend, reference)
    if name == "auto" and not (x.is_cuda and capability.has_triton()):
        return cast(Backend, reference)
    kernels = _triton()
    reason = kernels.uncovered(x, spec)
    if reason is None:
        return cast(Backend, kernels)
    if name == "auto":
        return cast(Backend, reference)
    raise UserError(f"backend='triton' cannot quantize this tensor: {reason}. Use backend='auto' or 'reference'.")

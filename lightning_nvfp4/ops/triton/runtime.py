"""Launching kernels with little of Python: a compiled kernel is kept by all that it was compiled for."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU; read when triton is imported."""
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_called: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""The same by the numbers themselves, which are looked up sooner than what Triton compiles for."""
_MOST_CALLED = 4096


def native_fp8(on: Tensor) -> bool:
    """Return whether the device of a tensor converts float32 to FP8, and not Triton's interpreter."""
    return not INTERPRETED and not isinstance(on, FakeTensor) and _capability(on.get_device()) >= (8, 9)


def in_pairs(x: Tensor) -> bool:
    """Return whether a contiguous tensor is BF16 that can be read two elements at a time."""
    return x.dtype == torch.bfloat16 and not isinstance(x, FakeTensor) and x.data_ptr() % 4 == 0


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of a tensor.

    Triton finds the compiled kernel by inspecting every argument in Python, which takes longer than a small kernel
    runs. Here the key is what Triton compiles for: of a number, its width, whether it is one and whether sixteen
    divides it; of a tensor, its dtype and whether its address is aligned.

    Args:
        kernel: a `triton.jit` function whose constexprs come last.
        grid: one to three numbers of programs.
        on: tensor on the device.
        arguments: tensors, tensor descriptors and numbers, by position.
        options: constexprs by name, num_warps and num_stages.
    """
    if isinstance(on, FakeTensor):
        return  # a trace asks for shapes
    if INTERPRETED:
        kernel[grid](*arguments, enable_fp_fusion=False, **options)
        return
    device = on.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, on, *arguments, **options)
        return
    constants = options.values()
    call = (id(kernel), device, *[a if type(a) is int else _kind(a) for a in arguments], *constants)
    found = _called.get(call)
    if found is None:
        key = (id(kernel), device, *map(_kind, arguments), *constants)
        if (found := _compiled.get(key)) is None:
            # A contraction of products and sums would change bits.
            compiled = kernel[grid](*arguments, enable_fp_fusion=False, **options)
            _compiled[key] = (compiled, tuple(options[name] for name in kernel.arg_names[len(arguments) :]))
            return
        if len(_called) == _MOST_CALLED:
            _called.clear()
        _called[call] = found
    found[0][(*grid, 1, 1)[:3]](*arguments, *found[1])


def _kind(argument: Any) -> Any:
    """Return what the compiled kernel depends on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument.base.dtype, *argument.block_shape

"""The kernels as custom operators, for graphs that torch.compile traces; outside of them the launchers are called.

A fake kernel of an operator is the launcher itself: on tensors without memory it allocates its results and launches
nothing (`runtime.launch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_nvfp4.ops.triton import gemm, launch
from lightning_nvfp4.recipe import QuantSpec


def written(spec: QuantSpec) -> str:
    """Return a format as the text that operators take; plain enough for a trace."""
    signs = "" if spec.hadamard_signs is None else ",".join([str(sign) for sign in spec.hadamard_signs])
    block = spec.block or (0, 0)
    return (
        f"{spec.format} {spec.element} {spec.rounding} {block[0]} {block[1]} {spec.tensor_scale} {spec.hadamard} "
        f"{spec.scale_rule} {spec.sr_bits} {signs}"
    )


@functools.cache
def _read(text: str) -> QuantSpec:
    format, element, rounding, rows, length, tensor_scale, hadamard, rule, bits, signs = text.split(" ")
    fields: dict[str, Any] = {
        "format": format,
        "element": element,
        "rounding": rounding,
        "block": (int(rows), int(length)),
        "tensor_scale": tensor_scale,
        "hadamard": int(hadamard),
        "hadamard_signs": tuple(int(sign) for sign in signs.split(",")) if signs else None,
        "scale_rule": rule,
        "sr_bits": int(bits),
    }
    return QuantSpec(**fields)


def _operator(function: Callable[..., Any]) -> Any:
    """Make a custom operator whose fake kernel is the function itself."""
    operator = torch.library.custom_op(f"lightning_nvfp4::{function.__name__}", function, mutates_args=())
    operator.register_fake(function)
    return operator


def _filled(tensors: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return a list of as many tensors, empty ones for ``None``: operators return no ``None``."""
    return [like.new_empty(0) if t is None else t for t in tensors]


@_operator
def quantize(
    x: Tensor, spec: str, dim: int, seed: Tensor, amax: Tensor | None, codes: bool, values: torch.dtype | None
) -> list[Tensor]:
    """`launch.quantize`, with empty tensors for what was not asked for; an amax that was given is not returned."""
    parts = launch.quantize(x, _read(spec), dim, seed, amax, codes, values)
    return _filled(parts if amax is None else (*parts[:4], None), x)


@_operator
def decode(
    codes: Tensor,
    block_scale: Tensor,
    tensor_scale: Tensor | None,
    spec: str,
    shape: list[int],
    dim: int,
    dtype: torch.dtype,
    inverse: bool,
) -> Tensor:
    """`launch.decode`."""
    return launch.decode(codes, block_scale, tensor_scale, _read(spec), tuple(shape), dim, dtype, inverse)


@_operator
def transform(x: Tensor, spec: str, dim: int) -> Tensor:
    """`launch.transform`."""
    return launch.transform(x, _read(spec), dim)


@_operator
def quantize_twice(x: Tensor, spec: str, seed: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """`launch.both`."""
    return _filled(launch.both(x, _read(spec), seed, dtype), x)


@_operator
def requantize(
    codes: Tensor,
    block_scale: Tensor,
    tensor_scale: Tensor,
    shape: list[int],
    spec: str,
    seed: Tensor,
    dtype: torch.dtype,
    source: torch.dtype,
) -> Tensor:
    """`launch.requantize`."""
    return launch.requantize(codes, block_scale, tensor_scale, tuple(shape), _read(spec), seed, dtype, source)


@_operator
def rows(
    a_RK: Tensor,
    b: Tensor,
    offsets: Tensor,
    transposed: bool,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias_EN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`gemm.rows`."""
    return gemm.rows(a_RK, b, offsets, transposed, row_scale, column_scale, bias_EN, dtype)


@_operator
def tokens(
    a_RN: Tensor, b_RK: Tensor, offsets: Tensor, row_scale: Tensor | None, column_scale: Tensor | None
) -> Tensor:
    """`gemm.tokens`."""
    return gemm.tokens(a_RN, b_RK, offsets, row_scale, column_scale)

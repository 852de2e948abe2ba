"""The reference on a CPU with its hot loops compiled: the same steps as `quantize`, the same bits.

Applies to plain CPU tensors outside of tracing; everything else runs the torch definition.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from lightning_nvfp4.ops.layout import block_of, num_elements, per_expert, stored_length, tile_amax
from lightning_nvfp4.ops.reference import quantize as definition
from lightning_nvfp4.ops.reference.native import Kernels, library
from lightning_nvfp4.ops.reference.scales import decode_tensor_scale, encode_tensor_scale
from lightning_nvfp4.recipe import QuantSpec

_log = logging.getLogger(__name__)
_PLAIN = (Tensor, torch.nn.Parameter)
_CHECKED = (
    QuantSpec("nvfp4"),
    QuantSpec("nvfp4", block=(16, 16), hadamard=16, rounding="stochastic"),
    QuantSpec("mxfp8", element="e5m2", rounding="stochastic"),
    QuantSpec("mxfp8", scale_rule="floor"),
    QuantSpec("s2f6", rounding="stochastic", sr_bits=8),
    QuantSpec("fp8_block"),
)
"""One spec for each branch of the kernels."""


def kernels_for(x: Tensor) -> Kernels | None:
    """Return the kernels if they can work on x, else ``None``."""
    if type(x) not in _PLAIN or x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009
    if functorch.is_functorch_wrapped_tensor(x):  # of vmap and other transforms: it has no memory of its own
        return None
    return kernels()


@functools.cache
def kernels() -> Kernels | None:
    """Return the compiled kernels once they have given the definition's bits on a sample, else ``None``."""
    lib = library()
    if lib is None:
        return None
    found = Kernels(lib)
    sample = torch.arange(1, 35 * 150 + 1, dtype=torch.float32).reshape(35, 150).sin_()
    sample *= torch.arange(-75, 75, dtype=torch.float32).exp2()
    sample[3, 20] = float("inf")
    for spec in _CHECKED:
        for dim in (0, 1):
            fast = quantize(found, sample, spec, dim, 7, None, packed=True)
            slow = definition.quantize_packed(sample, spec, dim, 7, None)
            codes, block_scale = slow[:2]
            length = stored_length(sample.shape[dim], spec)
            values = found.decode(codes, block_scale, spec, length)
            expected = definition.decode(codes, block_scale, spec, length)
            pairs = ((fast[0], codes), (fast[1], block_scale), (values.view(torch.int32), expected.view(torch.int32)))
            if not all(a is not None and torch.equal(a, b) for a, b in pairs):
                _log.info("The compiled kernels disagree with the definition on %s: not used.", spec)
                return None
    return found


def quantize(
    found: Kernels, x: Tensor, spec: QuantSpec, dim: int, seed: int | Tensor, amax: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Quantize as `definition.quantize_packed` (or, unless `packed`, `definition.quantize_unpacked`) does.

    Returns:
        (codes, scale codes) or (values, None), then the decode tensor scale and its amax.
    """
    moved = _loadable(x.detach().movedim(dim, -1))
    lead_shape = moved.shape[:-1]
    block_rows, length = block_of(spec)
    x3 = _three(moved)
    if spec.hadamard:
        x3 = found.hadamard(x3, spec)
    tops = encode3 = decode = None
    if spec.format == "nvfp4" or block_rows > 1:
        tops = found.block_tops(x3, length)
        if spec.format == "nvfp4":
            amax, encode, decode = _tensor_scales(found, tops, x3, spec, dim, lead_shape, amax)
            encode3 = _three(encode.expand(*lead_shape, tops.shape[-1]))
        tops = tile_amax(tops, block_rows).contiguous()
    random = _random(found, x, moved.shape, spec, dim, seed) if spec.rounding == "stochastic" else None
    first, second = found.quantize(x3, spec, tops, encode3, random, packed)
    return (
        first.reshape(*lead_shape, first.shape[-1]),
        None if second is None else second.reshape(*lead_shape, second.shape[-1]),
        decode,
        amax,
    )


def hadamard_transform(found: Kernels, moved: Tensor, spec: QuantSpec) -> Tensor:
    """Return the transform of a moved tensor, padded to whole transforms."""
    out = found.hadamard(_three(_loadable(moved)), spec)
    return out.reshape(*moved.shape[:-1], out.shape[-1])


def _loadable(moved: Tensor) -> Tensor:
    """Return a tensor whose memory the kernels can read: of their dtypes, and not a lazily negated view."""
    return moved.resolve_neg() if moved.dtype in (torch.float32, torch.bfloat16) else moved.to(torch.float32)


def _three(moved: Tensor) -> Tensor:
    """Return a moved tensor as (lead, rows, length): a view where possible."""
    if moved.ndim < 3:
        return moved[(None,) * (3 - moved.ndim)]
    return moved if moved.ndim == 3 else moved.reshape(-1, *moved.shape[-2:])


def _tensor_scales(
    found: Kernels, tops: Tensor, x3: Tensor, spec: QuantSpec, dim: int, lead_shape: torch.Size, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return amax, encode and decode tensor scale from the maxima of blocks, or from an explicit amax."""
    if amax is None:
        if spec.tensor_scale == "row":
            shape = (*lead_shape, 1)
        elif per_expert(len(lead_shape) + 1, dim):
            shape = (lead_shape[0], 1, 1)
        else:
            shape = ()
        scales = found.tensor_scales(tops, shape)
        if scales is not None:
            return scales
        amax = definition.tensor_amax(x3.to(torch.float32).reshape(*lead_shape, x3.shape[-1]), spec, dim)
    encode = encode_tensor_scale(amax, spec)
    return amax, encode, decode_tensor_scale(encode)


def _random(found: Kernels, x: Tensor, shape: torch.Size, spec: QuantSpec, dim: int, seed: int | Tensor) -> Tensor:
    """Return `definition.random_bits` as (lead, rows, length)."""
    added = stored_length(shape[-1], spec) - shape[-1]
    rows, count = num_elements(tuple(shape[:-1])), x.numel()
    words = found.random(int(seed), count + rows * added)
    bits = words[:count].reshape(x.shape).movedim(dim, -1)
    if added:
        bits = torch.cat((bits, words[count:].reshape(*shape[:-1], added)), dim=-1)
    return _three(bits)

"""The start-up test of Transformer Engine: its quantizers' bytes against the reference's.

Source of the layouts: TransformerEngine 2.20, `get_scale_shape` of pytorch/tensor/*_tensor.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.formats.rounding import FP32_MANTISSA_BITS, STOCHASTIC
from lightning_nvfp4.ops.layout import block_of
from lightning_nvfp4.ops.select import quantize
from lightning_nvfp4.ops.te.gradient import Gradient
from lightning_nvfp4.ops.te.plan import TENSORS, QuantizerPlan, planned
from lightning_nvfp4.recipe import GemmRecipe, QuantSpec

_SHAPE = (256, 384)
_SEED = 7


class Bytes(NamedTuple):
    """What a plane holds, laid out as `ops.contract.QuantizedTensor` does.

    Attributes:
        codes: uint8.
        block_scale: uint8.
        amax: float32 behind the tensor scale, ``None`` for formats without.
    """

    codes: Tensor
    block_scale: Tensor
    amax: Tensor | None


def quantized(plan: QuantizerPlan, x: Tensor, spec: QuantSpec, dim: int) -> Bytes:
    """Quantize a matrix (M, K) by TE's own quantizer and undo TE's layout of the plane along `dim`.

    Args:
        plan: of a single quantizer that makes this plane.
        x: BF16 or FP32 on CUDA, both dims multiples of 128.
        spec: the format of the plane.
        dim: 1 for the rowwise plane, 0 for the columnwise one.
    """
    from lightning_nvfp4.ops.te import recipes

    quantizer = recipes.compose(plan, Gradient(), recipes.native)
    with torch.no_grad():
        return plane(quantizer(x), spec, tuple(x.shape), dim)


def plane(tensor: Any, spec: QuantSpec, shape: tuple[int, ...], dim: int) -> Bytes:
    """Return what a plane of a TE tensor holds; arguments as `quantized`."""
    name = "rowwise" if dim else "columnwise"
    data, scale = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    codes = data.view(torch.uint8)
    along, length = shape[1 - dim], shape[dim]
    rows, block = block_of(spec)
    blocks = length // block
    if spec.format == "fp8_block":
        # Columnwise data is transposed. Scales are FP32: of tiles as (tiles, blocks), of rows as (blocks, rows).
        if rows > 1:
            scale = scale[:, :blocks].repeat_interleave(rows, dim=0)[:along]
        else:
            scale = scale[:, :along].t()
        return Bytes(codes, (scale.contiguous().view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8), None)
    if spec.format == "mxfp8":
        # Columnwise data is not transposed, nor are its scales.
        if dim == 0:
            codes, scale = codes.t(), scale.t()
        return Bytes(codes, scale.view(torch.uint8)[:along, :blocks], None)
    amax = getattr(tensor, f"_amax_{name}")
    return Bytes(codes, scale.view(torch.uint8)[:along, :blocks], amax)


def sample(device: torch.device | str) -> Tensor:
    """Return a BF16 matrix whose rows differ in size by up to 2^12, with zeros and outliers."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(_SHAPE, generator=generator)
    x *= torch.randint(-8, 5, (_SHAPE[0], 1), generator=generator).float().exp2()
    x[::7, ::5] *= 64
    x[3] = 0
    return x.to(device, torch.bfloat16)


def differences(gemm: GemmRecipe, device: torch.device | str) -> list[str]:
    """Return one line for each plane of a layer whose bytes, by TE, are not the reference's.

    Stochastic planes are left out: ours come from our own kernels, and TE's draws other random bits.
    """
    found = []
    for tensor, plan in planned(gemm).items():
        operands = [getattr(gemm, name) for name in TENSORS[tensor]]
        parts = plan.parts or (plan, plan)
        x = sample(device)
        if tensor == "weight":
            x = x.float()
        for part, spec, dim in zip(parts, operands, (1, 0), strict=True):
            if spec is None or spec.rounding == STOCHASTIC:
                continue
            ours = quantize(x.cpu(), spec, dim=dim, backend="reference")
            theirs = quantized(part, x, spec, dim)
            pairs = [("codes", theirs.codes, ours.codes), ("block scales", theirs.block_scale, ours.block_scale)]
            if theirs.amax is not None and ours.amax is not None:
                pairs.append(("amax", theirs.amax.flatten(), ours.amax.flatten()))
            for name, a, b in pairs:
                wrong = int((a.cpu() != b).sum()) if a.shape == b.shape else -1
                if wrong:
                    count = f"{wrong} of {b.numel()} {name}" if wrong > 0 else f"the shape of {name} {tuple(a.shape)}"
                    found.append(f"{tensor} {spec.format} along dim {dim}: {count} differ")
    return found


@functools.cache
def require(gemms: frozenset[GemmRecipe], device: torch.device) -> None:
    """Compare the bytes of every plane of these numerics, once in this process.

    Raises:
        UserError: some differ; training would go on with other numbers than the recipe's.
    """
    found = sorted({line for gemm in gemms for line in differences(gemm, device)})
    if found:
        raise UserError(
            f"Transformer Engine's quantizers on {device} do not give the reference's bytes ({'; '.join(found)}). Use "
            "backend='triton', which has the recipe's numerics, and report it with `nvfp4 doctor`."
        )

"""The random Hadamard transform (RHT): y = x diag(s) H / sqrt(n) in groups of n along the last dim.

H is Sylvester's, H[i][j] = (-1)^popcount(i & j). The sum runs as butterflies of fixed order in FP32, so its bits do
not depend on a matrix library, and is rounded to BF16 once, as Transformer Engine does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_nvfp4.formats.block import HADAMARD_SIGNS
from lightning_nvfp4.recipe import QuantSpec


def sign_vector(spec: QuantSpec) -> tuple[int, ...]:
    """Return the signs of a spec's transform, repeated to its length."""
    signs = spec.hadamard_signs or HADAMARD_SIGNS
    return signs * ((spec.hadamard or 0) // len(signs))


def factors(n: int) -> tuple[float, float]:
    """Return 1 / sqrt(n) as an exact power of two, applied before the sum, and the FP32 rest, applied after it."""
    half = (n.bit_length() - 1) // 2
    return 2.0**-half, 1.0 if n == 4**half else math.sqrt(0.5)


def _signs(spec: QuantSpec, like: Tensor) -> Tensor:
    return torch.tensor(sign_vector(spec), dtype=like.dtype, device=like.device)


def _butterflies(x: Tensor) -> Tensor:
    """Apply the unnormalized transform along the last dim."""
    n = x.shape[-1]
    half = 1
    while half < n:
        pair = x.unflatten(-1, (n // (2 * half), 2, half))
        upper, lower = pair[..., 0, :], pair[..., 1, :]
        x = torch.stack((upper + lower, upper - lower), dim=-2).flatten(-3)
        half *= 2
    return x


def transform(x: Tensor, spec: QuantSpec) -> Tensor:
    """Transform groups along the last dim and round to BF16 once.

    Args:
        x: float32, last dim a multiple of ``spec.hadamard``.
        spec: names the length and the signs.

    Returns:
        float32 of the same shape, every value a BF16 value.
    """
    n = spec.hadamard or 1
    before, after = factors(n)
    groups = x.unflatten(-1, (-1, n)) * (_signs(spec, x) * before)
    return (_butterflies(groups) * after).flatten(-2).to(torch.bfloat16).to(torch.float32)


def inverse(y: Tensor, spec: QuantSpec) -> Tensor:
    """Undo `transform` up to its rounding; float32 or float64 in, the same out."""
    n = spec.hadamard or 1
    before, after = factors(n)
    groups = y.unflatten(-1, (-1, n)) * before
    return ((_butterflies(groups) * after) * _signs(spec, y)).flatten(-2)

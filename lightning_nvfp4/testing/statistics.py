"""Comparisons with a stated allowance."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def assert_within_steps(actual: Tensor, expected: Tensor, step: Tensor | float, steps: float = 1.0) -> None:
    """Demand |actual - expected| <= steps * step everywhere, NaN nowhere.

    Args:
        actual: any floating-point tensor.
        expected: of the same shape.
        step: distance of neighbouring values of the format, broadcastable.
        steps: how many of them are allowed.

    Raises:
        AssertionError: with the first coordinate outside and both values there.
    """
    error = (actual.double() - expected.double()).abs()
    outside = ~(error <= steps * torch.as_tensor(step, dtype=torch.float64, device=error.device))
    if bool(outside.any()):
        at = tuple(outside.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(outside.sum())} of {outside.numel()} are more than {steps} steps off, first at {at}: "
            f"{actual[at].item()!r} against {expected[at].item()!r}."
        )


def sqnr_db(actual: Tensor, reference: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(sum reference^2 / sum (actual - reference)^2) in dB."""
    noise = (actual.double() - reference.double()).square().sum().item()
    signal = reference.double().square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf


def assert_unbiased(away: Tensor, draws: int, probability: Tensor, limit: float = 5.0) -> None:
    """Demand that stochastic roundings go away from zero as often as they should.

    Each row's z-score must stay below `limit`, the sum of their squares within `limit` deviations of its mean, and
    rows with probability 0 or 1 must not vary.

    Args:
        away: how often each row went away from zero in `draws` draws, (rows,).
        draws: independent draws of each row.
        probability: the exact probability of each row, (rows,).
        limit: in standard deviations.

    Raises:
        AssertionError: with the row, the count, the probability and the z-score.
    """
    count, p = away.double(), probability.double()
    variance = draws * p * (1 - p)
    fixed = variance == 0
    wrong = fixed & (count != draws * p)
    z = torch.where(fixed, 0.0, (count - draws * p) / variance.clamp(min=1e-300).sqrt())
    # A row that is expected to move less than once in all draws has no bell curve: allow it a handful.
    rare = ~fixed & (torch.minimum(p, 1 - p) * draws < 10)
    handful = (count - draws * p).abs() <= 4 * limit
    wrong |= torch.where(rare, ~handful, z.abs() >= limit)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise AssertionError(
            f"row {row} went away {int(count[row])} times of {draws}, expected probability {p[row].item():.9g} "
            f"(z = {z[row].item():.2f})."
        )
    common = z[~fixed & ~rare]
    total, freedom = float(common.square().sum()), common.numel()
    if freedom and abs(total - freedom) >= limit * math.sqrt(2 * freedom):
        raise AssertionError(f"sum of z^2 over {freedom} rows is {total:.1f}: the counts are not binomial.")

"""The GRPO objective as pure functions of log-probabilities: advantages, ratios, clipping, divergences.

Shapes: N prompts, G completions of each, B = N * G rows, T completion tokens, V vocabulary. Three policies meet:
`rollout` sampled the tokens, `old` is the trainer's own view of the same weights, `logps` the weights being trained.
All log-probabilities are FP32 and of one distribution, softmax(logits / temperature) over the whole vocabulary.

Sources: GRPO (arXiv:2402.03300); token-level loss and the wider upper clip of DAPO (arXiv:2503.14476); no division by
the standard deviation, Dr. GRPO (arXiv:2503.20783); the k3 estimate of KL, Schulman (2020), "Approximating KL
divergence".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """`values` (N, G) FP32; `zero_variance_share`, scalar: groups whose rewards are all equal and teach nothing."""

    values: Tensor
    zero_variance_share: Tensor


@dataclass(frozen=True)
class Objective:
    """`loss`, a scalar to minimise, and detached scalars that describe the step."""

    loss: Tensor
    metrics: dict[str, Tensor]


def group_advantages(rewards_NG: Tensor, scale_by_std: bool = True, eps: float = 1e-4) -> Advantages:
    """Return each completion's reward minus its group's mean, divided by the group's standard deviation.

    Args:
        rewards_NG: (N, G), any float dtype; G of at least 2.
        scale_by_std: False leaves out the division, which favours prompts whose rewards hardly vary.
        eps: added to the standard deviation (unbiased).

    A group without variance has advantage exactly 0.
    """
    rewards = rewards_NG.float()
    flat = zero_variance(rewards).unsqueeze(1)
    values = rewards - rewards.mean(dim=1, keepdim=True)
    if scale_by_std:
        values = values / (rewards.std(dim=1, keepdim=True) + eps)
    return Advantages(values.masked_fill(flat, 0.0), flat.float().mean())


def zero_variance(rewards_NG: Tensor) -> Tensor:
    """Return for each group whether all its rewards are equal, (N,) bool."""
    return (rewards_NG == rewards_NG[:, :1]).all(dim=1)


def token_logps(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at the tokens, (B, T) FP32, differentiable in the logits."""
    logits = logits_BTV.float() / temperature
    return logits.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)


@torch.no_grad()
def token_entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of softmax(logits / temperature) in nats, (B, T) FP32; row by row to bound the memory."""
    rows = []
    for logits_TV in logits_BTV:
        logps = torch.log_softmax(logits_TV.float() / temperature, dim=-1)
        rows.append(-(logps.exp() * logps).nan_to_num(nan=0.0).sum(dim=-1))
    return torch.stack(rows)


def k3(logps: Tensor, sampled_logps: Tensor) -> Tensor:
    """Per-token estimate of KL(sampling policy || other), never negative: r - 1 - log r with r = other / sampling."""
    log_ratio = logps - sampled_logps
    return torch.expm1(log_ratio) - log_ratio


def grpo_objective(
    logps_BT: Tensor,
    old_logps_BT: Tensor,
    rollout_logps_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    tis_cap: float | None = 2.0,
    reference_logps_BT: Tensor | None = None,
    beta: float = 0.0,
    denominator: Tensor | None = None,
) -> Objective:
    """Return the clipped, importance-corrected policy loss, averaged over all tokens of the batch alike.

    Per token, with r = exp(logps - old) and w = min(exp(old - rollout), tis_cap), the truncated importance weight
    that corrects for sampling with other numerics than training:

        loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + beta * k3(reference, logps)

    Args:
        logps_BT: log-probabilities under the weights being trained, with gradient.
        old_logps_BT: the trainer's log-probabilities before the first update on these rollouts.
        rollout_logps_BT: those recorded while sampling.
        advantages_B: one value a completion.
        mask_BT: True at the tokens of the completion, the stop token included.
        clip_low: how far below 1 the ratio may fall before a token stops pushing it down.
        clip_high: the same above 1.
        tis_cap: None leaves the weight out.
        reference_logps_BT: of the reference policy, where `beta` is above 0.
        beta: weight of the divergence from the reference, differentiated through k3.
        denominator: number of tokens to divide by; default, those of this batch.

    A token whose log-probability is not finite has ratio exactly 1, counts in `nonfinite_share` and in no other metric.
    """
    mask = mask_BT.bool()
    advantages = advantages_B.float().unsqueeze(1).expand_as(logps_BT)
    ratio, own_finite = _neutral_ratio(logps_BT, old_logps_BT)
    mismatch, pair_finite = _neutral_ratio(old_logps_BT.detach(), rollout_logps_BT)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    if tis_cap is not None:
        per_token = per_token * mismatch.clamp(max=tis_cap)
    count = mask.sum().clamp(min=1) if denominator is None else denominator.clamp(min=1)
    metrics: dict[str, Tensor] = {}
    if reference_logps_BT is not None:
        # k3 of KL(trained || reference): the tokens stand for samples of the trained policy.
        finite = torch.isfinite(logps_BT) & torch.isfinite(reference_logps_BT)
        divergence = k3(reference_logps_BT.where(finite, 0.0), logps_BT.where(finite, 0.0))
        per_token = per_token + beta * divergence
        metrics["reference_kl"] = _masked_mean(divergence.detach(), mask & finite)
    loss = per_token.masked_fill(~mask, 0.0).sum() / count
    with torch.no_grad():
        valid = mask & pair_finite & own_finite
        difference = (old_logps_BT - rollout_logps_BT).where(valid, 0.0)
        binding = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
        metrics |= {
            "kl": _masked_mean(torch.expm1(difference) - difference, valid),
            "logp_diff": _masked_mean(difference.abs(), valid),
            "clip_share": _masked_mean(binding.float(), valid),
            "nonfinite_share": _masked_mean((~(pair_finite & own_finite)).float(), mask),
        }
        if tis_cap is not None:
            metrics["tis_capped_share"] = _masked_mean((mismatch > tis_cap).float(), valid)
    return Objective(loss, metrics)


def _neutral_ratio(logps: Tensor, base_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(logps - base) with 1 (and no gradient) where either is not finite, and where both are."""
    finite = torch.isfinite(logps) & torch.isfinite(base_logps)
    return torch.exp(logps.where(finite, 0.0) - base_logps.where(finite, 0.0)), finite


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)

"""Laws of the GRPO objective, against formulas written out and finite differences of nothing but the definition."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.rl.abort import AbortThresholds
from lightning_nvfp4.lm.rl.objective import group_advantages, grpo_objective, k3, token_entropy, token_logps

NAN = float("nan")


def row(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], requires_grad=grad)


def test_advantages_have_zero_mean_and_unit_deviation_in_every_group() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]])
    advantages = group_advantages(rewards)
    assert advantages.zero_variance_share == 0.5 and torch.equal(advantages.values[2:], torch.zeros(2, 4))
    torch.testing.assert_close(advantages.values[:2].mean(1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.values[:2].std(1), torch.ones(2), atol=1e-3, rtol=0)
    unscaled = group_advantages(rewards, scale_by_std=False).values
    assert torch.equal(unscaled[1], torch.tensor([-0.25, -0.25, -0.25, 0.75]))
    assert torch.equal(group_advantages(rewards + 5, scale_by_std=False).values[:2], unscaled[:2])


def test_log_probabilities_are_those_of_the_tempered_softmax() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 6, 3], [1, 1, 2]])
    for temperature in (1.0, 0.5):
        every = torch.log_softmax(logits / temperature, -1)
        torch.testing.assert_close(
            token_logps(logits, tokens, temperature), every.gather(-1, tokens[..., None])[..., 0]
        )
        torch.testing.assert_close(token_entropy(logits, temperature), -(every.exp() * every).sum(-1))
    assert token_entropy(torch.zeros(1, 1, 8)).item() == pytest.approx(math.log(8))
    assert token_entropy(torch.tensor([[[0.0, -math.inf]]])).item() == 0.0
    assert token_logps(logits.bfloat16(), tokens).dtype == torch.float32


def test_on_policy_the_gradient_is_the_policy_gradient_averaged_over_tokens() -> None:
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    objective = grpo_objective(logps, logps.detach(), logps.detach(), torch.tensor([2.0, -1.0]), mask)
    objective.loss.backward()
    assert objective.loss == -(3 * 2.0 - 2 * 1.0) / 5
    torch.testing.assert_close(logps.grad, torch.tensor([[-2.0, -2, -2], [1, 1, 0]]) / 5)
    assert {name: float(value) for name, value in objective.metrics.items()} == {
        "kl": 0, "logp_diff": 0, "clip_share": 0, "nonfinite_share": 0, "tis_capped_share": 0,
    }  # fmt: skip
    shared = grpo_objective(logps, logps, logps, torch.tensor([2.0, -1.0]), mask, denominator=torch.tensor(10.0))
    torch.testing.assert_close(shared.loss, objective.loss / 2)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (0.5, 1.0, 0.0),
        (0.5, -1.0, math.exp(0.5)),
        (-0.5, 1.0, -math.exp(-0.5)),
        (-0.5, -1.0, 0.0),
        (0.24, 1.0, -math.exp(0.24)),
    ],
)
def test_a_ratio_beyond_the_clip_stops_pushing_outwards_only(
    log_ratio: float, advantage: float, gradient: float
) -> None:
    logps = row(-1.0 + log_ratio, grad=True)
    objective = grpo_objective(logps, row(-1.0), row(-1.0), torch.tensor([advantage]), row(1) > 0)
    objective.loss.backward()
    assert logps.grad.item() == pytest.approx(gradient)
    assert objective.metrics["clip_share"] == float(gradient == 0)


def test_truncated_importance_weights_multiply_and_are_capped() -> None:
    rollout, old = row(-1.0, -1.0, -1.0), row(-0.7, -1.4, 2.0)
    for cap, weights in ((2.0, [math.exp(0.3), math.exp(-0.4), 2.0]), (None, [1.0, 1.0, 1.0])):
        logps = old.clone().requires_grad_()
        objective = grpo_objective(logps, old, rollout, torch.tensor([1.0]), torch.ones(1, 3), tis_cap=cap)
        objective.loss.backward()
        torch.testing.assert_close(logps.grad, -torch.tensor([weights]) / 3)
    assert grpo_objective(old, old, rollout, torch.ones(1), torch.ones(1, 3)).metrics[
        "tis_capped_share"
    ] == pytest.approx(1 / 3)


def test_kl_and_difference_are_between_rollout_and_trainer() -> None:
    old, rollout = row(-1.0, -2.5, 7.0), row(-1.5, -2.0, 0.0)
    mask = torch.tensor([[True, True, False]])
    metrics = grpo_objective(row(-9, -9, -9), old, rollout, torch.ones(1), mask).metrics
    expected = sum(math.exp(d) - 1 - d for d in (0.5, -0.5)) / 2
    assert metrics["kl"].item() == pytest.approx(expected) and metrics["logp_diff"].item() == 0.5


def test_k3_is_unbiased_and_never_negative() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    estimates = k3(q.log(), p.log())
    assert (estimates >= 0).all()
    torch.testing.assert_close((p * estimates).sum(), (p * (p / q).log()).sum())


def test_a_token_without_a_finite_log_probability_has_ratio_one_and_is_only_counted() -> None:
    clean_old, clean_rollout = row(-1.0, -2.0), row(-1.5, -2.0)
    clean = grpo_objective(row(-1.0, -2.0), clean_old, clean_rollout, torch.ones(1), torch.ones(1, 2))
    for bad in (NAN, -math.inf, math.inf):
        rollout = torch.cat([clean_rollout, row(bad)], 1)
        logps = row(-1.0, -2.0, -3.0, grad=True)
        objective = grpo_objective(logps, logps.detach(), rollout, torch.ones(1), torch.ones(1, 3))
        objective.loss.backward()
        assert logps.grad[0, 2].item() == pytest.approx(-1 / 3)  # weight exactly 1, still trained
        assert objective.metrics["nonfinite_share"].item() == pytest.approx(1 / 3)
        assert all(objective.metrics[name] == clean.metrics[name] for name in ("kl", "logp_diff", "clip_share"))
    logps = row(-1.0, NAN, grad=True)
    objective = grpo_objective(logps, logps.detach(), row(-1.0, -1.0), torch.ones(1), torch.ones(1, 2))
    objective.loss.backward()
    assert torch.equal(logps.grad, row(-0.5, 0.0)) and objective.loss == -1.0


def test_the_divergence_from_a_reference_pulls_towards_it() -> None:
    logps = row(-1.0, -1.0, grad=True)
    reference = row(-2.0, -1.0)
    objective = grpo_objective(
        logps, logps.detach(), logps.detach(), torch.zeros(1), torch.ones(1, 2), reference_logps_BT=reference, beta=0.5
    )
    objective.loss.backward()
    expected = math.exp(-1.0) - 1 + 1
    assert objective.metrics["reference_kl"].item() == pytest.approx(expected / 2)
    torch.testing.assert_close(logps.grad, row(0.5 * (1 - math.exp(-1)) / 2, 0.0))


def test_a_batch_without_tokens_has_loss_zero() -> None:
    logps = row(-1.0, grad=True)
    objective = grpo_objective(logps, logps.detach(), row(-1.0), torch.ones(1), torch.zeros(1, 1))
    objective.loss.backward()
    assert objective.loss == 0 and logps.grad == 0 and all(torch.isfinite(v) for v in objective.metrics.values())


def test_thresholds_name_what_crossed_them() -> None:
    metrics = {"logp_diff": 0.04, "kl": 0.1, "entropy": 0.5, "truncated_share": 1.0, "nonfinite_share": 0.0}
    AbortThresholds().check(metrics, step=3)
    with pytest.raises(UserError, match=r"step 3: rl/entropy is 0.5, abort.min_entropy is 0.6.*rl/kl 0.1"):
        AbortThresholds(min_entropy=0.6).check(metrics, step=3)
    with pytest.raises(UserError, match="rl/logp_diff is 0.9, abort.max_logp_diff is 0.5"):
        AbortThresholds().check(metrics | {"logp_diff": 0.9}, step=3)
    with pytest.raises(UserError, match="rl/logp_diff is nan"):
        AbortThresholds().check(metrics | {"logp_diff": NAN}, step=3)

"""Laws of the optimizer and the learning-rate schedule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import (
    OptimizerConfig,
    ScheduleConfig,
    StepSchedule,
    as_config,
    build_adamw,
    parameter_groups,
    schedule_ratio,
)
from lightning_nvfp4.strategies.gradients import total_grad_norm


def ratios(steps: int, **fields) -> list[float]:
    return [schedule_ratio(ScheduleConfig(**fields), max_steps=steps)(step) for step in range(steps)]


def test_wsd_rises_stays_and_falls_along_one_minus_the_root() -> None:
    got = ratios(12, kind="wsd", warmup_steps=2, decay_start=6, decay_steps=4, min_ratio=0.1)
    decay = [0.1 + 0.9 * (1 - math.sqrt(k / 4)) for k in range(5)]
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, *decay, 0.1])
    assert ratios(9, kind="wsd", decay_start=4, decay_steps=4, decay_shape="linear")[4:] == [1, 0.75, 0.5, 0.25, 0]


def test_wsd_without_a_decay_is_the_constant_schedule() -> None:
    assert ratios(20, kind="wsd", warmup_steps=4) == ratios(20, kind="constant", warmup_steps=4)


def test_linear_and_cosine_fall_to_the_last_step_by_default() -> None:
    assert ratios(5, kind="linear", warmup_steps=1) == [1, 1, 0.75, 0.5, 0.25]
    cosine = ratios(9, kind="cosine", min_ratio=0.2)
    assert cosine[0] == 1 and cosine[4] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 4 / 9)))
    assert all(later < earlier for earlier, later in zip(cosine, cosine[1:], strict=False))
    assert schedule_ratio(ScheduleConfig(kind="cosine", decay_steps=3, min_ratio=0.2))(100) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cosin"}, "schedule.kind 'cosin' is unknown. Did you mean 'cosine'"),
        ({"decay_start": 5}, "schedule.decay_start is 5 and schedule.decay_steps is None"),
        ({"warmup_steps": 9, "decay_start": 5, "decay_steps": 1}, "before the end of warm-up"),
        ({"warmup_steps": -1}, "schedule.warmup_steps is -1"),
        ({"min_ratio": 2}, "schedule.min_ratio is 2"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ScheduleConfig(**fields)


def test_open_ended_decay_and_bad_optimizer_fields_are_refused() -> None:
    with pytest.raises(UserError, match="schedule.decay_steps is not set for the linear schedule"):
        schedule_ratio(ScheduleConfig(kind="linear"), max_steps=-1)
    for fields, message in (
        ({"lr": 0}, "optimizer.lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -1}, "decay"),
    ):
        with pytest.raises(UserError, match=message):
            OptimizerConfig(**fields)
    with pytest.raises(UserError, match="optimizer field 'weight_deca' is unknown. Did you mean 'weight_decay'"):
        as_config(OptimizerConfig, {"weight_deca": 0.1}, "optimizer")


def test_only_matrices_decay_and_no_embedding_does(moe_fields) -> None:
    for tied in (True, False):
        model = build_model({**moe_fields, "tie_word_embeddings": tied, "attention_bias": True}, seed=0)
        decaying, free = parameter_groups(model, 0.1)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decaying_names = {names[id(p)] for p in decaying["params"]}
        free_names = {names[id(p)] for p in free["params"]}
        assert decaying["weight_decay"] == 0.1 and free["weight_decay"] == 0.0
        assert decaying_names | free_names == set(names.values()) and not decaying_names & free_names
        assert free_names == {n for n in names.values() if "norm" in n or "embed" in n or n.endswith("bias")}
        assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate.weight"} <= decaying_names
        assert ("lm_head.weight" in decaying_names) is not tied


def test_per_expert_biases_do_not_decay_and_frozen_parameters_are_left_out() -> None:
    module = nn.Module()
    module.down_proj_bias = nn.Parameter(torch.zeros(4, 8))
    module.frozen = nn.Parameter(torch.zeros(4, 8), requires_grad=False)
    (group,) = parameter_groups(module, 0.1)
    assert group["weight_decay"] == 0.0 and group["params"][0] is module.down_proj_bias
    with pytest.raises(UserError, match="no trainable parameter"):
        build_adamw(module.requires_grad_(False), OptimizerConfig())


def test_weight_decay_does_to_the_weights_what_it_says() -> None:
    linear = nn.Linear(4, 4)
    optimizer = build_adamw(linear, OptimizerConfig(lr=0.5, weight_decay=0.1))
    linear.weight.grad, linear.bias.grad = torch.zeros(4, 4), torch.zeros(4)
    before = linear.weight.detach().clone(), linear.bias.detach().clone()
    optimizer.step()
    assert torch.equal(linear.weight, before[0] * (1 - 0.5 * 0.1)) and torch.equal(linear.bias, before[1])
    assert optimizer.defaults["fused"] is True


def test_loading_a_schedule_keeps_the_step_and_the_new_settings() -> None:
    """The order is the trainer's: optimizer state first, schedule second."""

    def make(lr: float, decay_start: int) -> tuple:
        linear = nn.Linear(2, 2)
        optimizer = build_adamw(linear, OptimizerConfig(lr=lr, weight_decay=lr, betas=(lr, lr)))
        config = ScheduleConfig(kind="wsd", decay_start=decay_start, decay_steps=4, decay_shape="linear")
        return linear, optimizer, StepSchedule(optimizer, schedule_ratio(config))

    linear, optimizer, schedule = make(0.5, decay_start=100)
    for _ in range(6):
        linear.weight.grad, linear.bias.grad = torch.ones(2, 2), torch.ones(2)
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.5]
    other, new_optimizer, new_schedule = make(0.25, decay_start=4)
    new_optimizer.load_state_dict(optimizer.state_dict())
    new_schedule.load_state_dict(schedule.state_dict())
    rates = []
    for _ in range(3):
        rates.append([group["lr"] for group in new_optimizer.param_groups])
        other.weight.grad, other.bias.grad = torch.ones(2, 2), torch.ones(2)
        new_optimizer.step()
        new_schedule.step()
    assert rates == [[0.125] * 2, [0.0625] * 2, [0.0] * 2]
    assert [group["weight_decay"] for group in new_optimizer.param_groups] == [0.25, 0.0]
    assert new_optimizer.param_groups[0]["betas"] == (0.25, 0.25)
    assert new_optimizer.state[other.weight]["step"] == 9


def test_the_norm_is_that_of_all_gradients_together() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2, 2), 1.0)
    assert total_grad_norm(parameters) == 4.0 and total_grad_norm([]) == 0.0


def test_the_rate_is_logged_with_the_norm_before_clipping(moe_fields, lm_data, make_trainer) -> None:
    settings = {"model": moe_fields, "optimizer": OptimizerConfig(lr=0.01), "schedule": ScheduleConfig(warmup_steps=4)}
    clipped, free = make_trainer(1, gradient_clip_val=1e-3), make_trainer(1)
    for trainer in (clipped, free):
        trainer.fit(CausalLM(**settings), lm_data())
    assert clipped.callback_metrics["train/grad_norm"] == free.callback_metrics["train/grad_norm"] > 0.1
    assert clipped.callback_metrics["train/lr"] == pytest.approx(0.01 / 4)

"""Laws of GRPO training: it raises the reward, says what it does, and stops when it should."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_policies import Trace, low_share, policy, weights

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.rl.abort import AbortThresholds
from lightning_nvfp4.lm.rl.grpo import GRPO
from lightning_nvfp4.lm.rl.rollout_log import RolloutLog

METRICS = (
    "reward reward_std zero_variance_share length truncated_share kl logp_diff clip_share nonfinite_share "
    "tis_capped_share loss entropy"
).split()


def starts_with_w10(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
    return [float(text.split()[:1] == ["w10"]) for text in completions]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_verifiable_reward_rises(moe_fields, prompt_data, make_trainer, updates: int) -> None:
    trace = Trace()
    module = policy(moe_fields, reward=starts_with_w10, group_size=16, max_new_tokens=2, updates_per_rollout=updates)
    make_trainer(30 * updates, callbacks=[trace]).fit(module, prompt_data())
    rewards = [metrics["rl/reward"] for metrics in trace.metrics]
    assert len(rewards) == 30
    assert sum(rewards[:3]) / 3 < 0.15 and sum(rewards[-3:]) / 3 > 0.8
    assert trace.metrics[-1]["rl/entropy"] < trace.metrics[0]["rl/entropy"]


def test_everything_is_logged_to_any_logger(moe_fields, prompt_data, make_trainer, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(2, logger=logger, log_every_n_steps=1)
    trainer.fit(policy(moe_fields), prompt_data())
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {f"rl/{name}" for name in METRICS} | {"train/grad_norm", "train/lr"} <= set(header)


def test_in_fp32_rollout_and_trainer_are_one_policy(moe_fields, prompt_data, make_trainer) -> None:
    trace = Trace()
    make_trainer(2, callbacks=[trace]).fit(policy(moe_fields), prompt_data())
    for metrics in trace.metrics:
        assert metrics["rl/logp_diff"] < 1e-5 and metrics["rl/kl"] < 1e-8
        assert metrics["rl/clip_share"] == metrics["rl/tis_capped_share"] == metrics["rl/nonfinite_share"] == 0
        assert 3.5 < metrics["rl/entropy"] < 4.2 and 1 <= metrics["rl/length"] <= 4


def test_groups_without_variance_move_nothing(moe_fields, prompt_data, make_trainer) -> None:
    trace = Trace()
    module = policy(moe_fields, reward=lambda texts, _: [1.0] * len(texts))
    make_trainer(2, callbacks=[trace]).fit(module, prompt_data())
    assert torch.equal(weights(module), trace.weights[0])
    assert trace.metrics[0]["rl/zero_variance_share"] == 1 and trace.metrics[0]["train/grad_norm"] == 0


def test_only_complete_answers_teach_when_truncated_ones_are_masked(moe_fields, prompt_data, make_trainer) -> None:
    trace = Trace()
    module = policy(moe_fields, max_new_tokens=1, mask_truncated=True, seed=1)
    data = prompt_data()
    data.tokenizer = _without_stops(data.tokenizer)
    make_trainer(1, callbacks=[trace]).fit(module, data)
    assert trace.metrics[0]["rl/truncated_share"] == 1 and torch.equal(weights(module), trace.weights[0])


def _without_stops(tokenizer: Any) -> Any:
    class Endless:
        eos_token_id, chat_template, pad_token_id = None, None, 0
        __len__ = tokenizer.__len__
        batch_decode = staticmethod(tokenizer.batch_decode)

    return type("Endless", (Endless,), {"__len__": lambda self: len(tokenizer)})()


def test_the_first_of_several_updates_is_the_single_update(moe_fields, prompt_data, make_trainer) -> None:
    single, several = Trace(), Trace()
    module = policy(moe_fields)
    make_trainer(1, callbacks=[single], gradient_clip_val=0.1).fit(module, prompt_data())
    twice = policy(moe_fields, updates_per_rollout=3, gradient_clip_val=0.1)
    make_trainer(3, callbacks=[several]).fit(twice, prompt_data())
    assert torch.equal(single.weights[0], several.weights[0]) and torch.equal(several.weights[1], weights(module))
    assert len(several.metrics) == 1 and not torch.equal(several.weights[2], several.weights[1])
    assert several.metrics[0]["rl/reward"] == single.metrics[0]["rl/reward"]
    assert several.metrics[0]["rl/clip_share"] > 0 == single.metrics[0]["rl/clip_share"]


def test_the_reference_model_is_held_only_where_it_is_used(
    moe_fields, prompt_data, make_trainer, tmp_path: Path
) -> None:
    for beta in (0.0, 0.1):
        trace = Trace()
        module = policy(moe_fields, beta=beta)
        trainer = make_trainer(2, callbacks=[trace])
        trainer.fit(module, prompt_data())
        assert len(module._reference) == (beta > 0)
        assert ("rl/reference_kl" in trace.metrics[0]) is (beta > 0)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        names = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
        assert len(names) == len(module.network.state_dict())
    assert (
        trace.metrics[0]["rl/reference_kl"] == pytest.approx(0, abs=1e-6) and trace.metrics[1]["rl/reference_kl"] > 1e-5
    )
    reference = torch.cat([p.flatten() for p in module._reference[0].parameters()])
    assert torch.equal(reference, trace.weights[0])


def test_the_load_balance_loss_is_off_unless_asked_for(moe_fields, prompt_data, make_trainer) -> None:
    for coef in (0.0, 0.1):
        trace = Trace()
        make_trainer(1, callbacks=[trace]).fit(policy(moe_fields, aux_loss_coef=coef), prompt_data())
        assert ("rl/aux_loss" in trace.metrics[0]) is (coef > 0)


def test_completions_are_logged_for_a_few_prompts(moe_fields, prompt_data, make_trainer, tmp_path: Path) -> None:
    make_trainer(3).fit(policy(moe_fields, log_prompts=2), prompt_data())
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert set(rows[0]) == {"step", "prompt", "completion", "reward", "truncated"}
    assert rows[0]["prompt"] == rows[1]["prompt"] != rows[2]["prompt"]
    assert [low_share([row["completion"]], [{}])[0] for row in rows] == pytest.approx([row["reward"] for row in rows])


def test_the_log_is_bounded_and_rewound_at_resume(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "deep" / "rollouts.jsonl", max_bytes=100)
    log.rewind(0)
    for step in range(20):
        log.append([{"step": step, "completion": "€" * 5}])
    lines = log.path.read_text().splitlines()
    assert len(lines) == 2 and log.path.stat().st_size <= 100
    log.path.write_text("\n".join(lines) + '\n{"step": 2, "comp')
    log.rewind(1)
    assert log.path.read_text() == lines[0] + "\n"


def test_line_ends_inside_a_completion_and_damaged_rows_do_not_stop_a_resume(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts.jsonl")
    for step in range(2):
        log.append([{"step": step, "completion": "a\u2028b\x85c\x1dd"}])
    kept = log.path.read_bytes().splitlines(keepends=True)[0]
    log.path.write_bytes(log.path.read_bytes() + b"\0\0\n\xff\n[]\n")
    log.rewind(1)
    assert log.path.read_bytes() == kept


def test_training_stops_at_a_threshold(moe_fields, prompt_data, make_trainer) -> None:
    module = policy(moe_fields, abort=AbortThresholds(min_entropy=10.0))
    with pytest.raises(UserError, match=r"RL stopped at step 0: rl/entropy is [34]\.\d+, abort.min_entropy is 10"):
        make_trainer(2).fit(module, prompt_data())
    assert torch.equal(weights(module), weights_of_start(moe_fields))


def weights_of_start(fields: dict[str, Any]) -> torch.Tensor:
    module = policy(fields)
    module.configure_model()
    return weights(module)


def test_the_default_reward_reads_each_references_kind(moe_fields, prompt_data, make_trainer) -> None:
    trace = Trace()
    data = prompt_data()
    make = data.make
    data.make = lambda index: make(index) | {"references": [{"kind": "exact", "answer": "w10"}] * 6}
    module = policy(moe_fields, reward=None, max_new_tokens=1, group_size=64)
    make_trainer(1, callbacks=[trace]).fit(module, data)
    assert 0 < trace.metrics[0]["rl/reward"] < 0.2


def test_validation_scores_the_most_likely_completion(moe_fields, prompt_data, make_trainer) -> None:
    module = policy(moe_fields)
    results = [
        make_trainer(1, limit_val_batches=2).validate(module, prompt_data(), verbose=False)[0]["val/reward"]
        for _ in range(2)
    ]
    assert results[0] == results[1]


def test_a_checkpoint_holds_the_settings(moe_fields, prompt_data, make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(1)
    module = policy(moe_fields, tis_cap=None, abort=AbortThresholds(max_kl=3.0))
    trainer.fit(module, prompt_data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(weights(loaded), weights(module))
    assert loaded.tis_cap is None and loaded.abort.max_kl == 3.0 and loaded.group_size == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "group_size is 1: it must be a number of at least 2"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"tis_cap": 0.5}, "tis_cap is 0.5"),
        ({"beta": math.inf}, "beta is inf: it must be a number of at least 0"),
        ({"gradient_clip_val": math.nan, "minibatches": 2}, "gradient_clip_val is nan"),
        ({"reward": None, "rewards": {"exact": math.nan}}, "rewards.exact is nan"),
        ({"reward_options": {"timeout": math.nan}}, "timeout nan must be a number of seconds above 0"),
        ({"reward_options": {"workers": 0}}, "workers 0 at least 1"),
        ({"rollout": {"timeout": -1.0}}, "rollout.timeout is -1.0"),
        ({"abort": {"max_kl": math.nan}}, "abort.max_kl is nan: give a number, or null"),
        ({"reward_timeout": 0.0}, "reward_timeout is 0.0: it must be a number of seconds above 0"),
        ({"reward_timeout": math.inf}, "reward_timeout is inf"),
        ({"updates_per_rollout": 0}, "updates_per_rollout is 0"),
        ({"gradient_clip_val": 1.0}, "set trainer.gradient_clip_val"),
        ({"abort": {"max_kll": 1.0}}, "abort field 'max_kll' is unknown. Did you mean 'max_kl'"),
    ],
)
def test_settings_that_cannot_be_are_refused(moe_fields, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        policy(moe_fields, **options)


def test_prompts_that_may_exceed_the_positions_are_refused_before_the_first_step(
    moe_fields, prompt_data, make_trainer
) -> None:
    data = prompt_data()
    for longest, message in (
        (60, None),
        (61, "61 tokens and max_new_tokens = 4 exceed .*max_position_embeddings = 64"),
    ):
        data.max_prompt_length = longest
        trainer = make_trainer(1)
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            trainer.fit(policy(moe_fields), data)
        assert trainer.global_step == (message is None)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda texts, _: [1.0], "returned 1 values: it must return a list of 48 finite numbers"),
        (lambda texts, _: [float("nan")] * len(texts), "returned nan: it must return"),
        (lambda texts, _: None, "reward, <function .*lambda.*>, returned None: it must return"),
        (lambda texts, _: [None] * len(texts), r"returned \[None, None"),
        (lambda texts, _: [10**400] * len(texts), r"returned \[1000"),
        (lambda texts, _: ["1"] * len(texts), r"returned \['1', '1'"),
        (lambda texts, _: "1" * len(texts), "returned '1111"),
    ],
)
def test_a_reward_that_is_none_is_refused(moe_fields, prompt_data, make_trainer, reward: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(1).fit(policy(moe_fields, reward=reward), prompt_data())


def test_prompts_without_a_tokenizer_are_refused(moe_fields, prompt_data, make_trainer) -> None:
    data = prompt_data()
    data.tokenizer = None
    with pytest.raises(UserError, match="the datamodule's tokenizer"):
        make_trainer(1).fit(policy(moe_fields), data)

"""Laws of what a step learns from: batches of generation, groups drawn again, minibatches, rewards in threads."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_policies
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_policies import Trace, low_share, weights

from lightning_nvfp4.commands.metrics_log import RunCSVLogger
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.lm.optim import OptimizerConfig
from lightning_nvfp4.lm.rl.abort import AbortThresholds
from lightning_nvfp4.lm.rl.engines import RolloutConfig, prompt_batches
from lightning_nvfp4.lm.rl.grpo import GRPO
from lightning_nvfp4.lm.rl.reward_workers import RewardWorkers
from lightning_nvfp4.lm.rl.rollout import Sampling, join, rollout_generator, sample
from lightning_nvfp4.lm.rl.routing import recorded_routing, routing_agreement

CPU = torch.device("cpu")


policy = partial(tiny_policies.policy, group_size=4)


def fit(make_trainer: Any, module: GRPO, data: Any, steps: int = 1, **options: Any) -> list[dict[str, float]]:
    trace = Trace()
    make_trainer(steps, callbacks=[trace], **options).fit(module, data)
    return trace.metrics


def test_prompts_of_similar_length_are_generated_together_without_their_padding() -> None:
    lengths = [3, 5, 1, 4, 2]
    mask = torch.tensor([[0] * (5 - n) + [1] * n for n in lengths])
    ((rows, columns),) = prompt_batches(mask, None)
    assert rows.tolist() == [0, 1, 2, 3, 4] and mask[rows][:, columns].shape == (5, 5)
    batches = list(prompt_batches(mask, 2))
    assert [[lengths[row] for row in rows] for rows, _ in batches] == [[1, 2], [3, 4], [5]]
    assert [mask[rows][:, columns].shape[1] for rows, columns in batches] == [2, 4, 5]


def test_joined_rollouts_keep_every_row(moe_fields, prompt_data) -> None:
    model = build_model(moe_fields, seed=0)
    batch = prompt_data().make(0)

    def draw(rows: slice, columns: slice, seed: int, length: int) -> Any:
        return sample(
            model,
            batch["input_ids"][rows][:, columns],
            batch["attention_mask"][rows][:, columns],
            Sampling(length, temperature=1.0, stop_ids=(1, 2), pad_id=0),
            rollout_generator(seed, 0, 0, 0, CPU),
        )

    one, other = draw(slice(0, 6, 2), slice(2, None), 0, 3), draw(slice(1, 6, 2), slice(None), 1, 7)
    joined = join([one, other], pad_id=0)
    assert joined.routing is not None and joined.routing.shape == (6, 7, 2, 2)
    for part, rows in ((one, torch.arange(3)), (other, torch.arange(3, 6))):
        again = joined.rows(rows)
        width, length = part.sequences.shape[1], part.completion_mask.shape[1]
        assert torch.equal(again.truncated, part.truncated)
        for name in ("completions", "completion_mask", "logps", "routing"):
            assert torch.equal(getattr(again, name)[:, :length], getattr(part, name)), name
        assert not again.completion_mask[:, length:].any()
        prompt = width - length
        assert torch.equal(again.sequences[:, 5 - prompt : 5], part.sequences[:, :prompt])
        assert torch.equal(again.attention_mask[:, 5 - prompt : 5], part.attention_mask[:, :prompt])
        assert not again.attention_mask[:, : 5 - prompt].any()


def test_batches_of_generation_are_one_step(moe_fields, prompt_data, make_trainer) -> None:
    """Greedy completions do not depend on what they are generated with, nor does the order of the rows."""
    data = prompt_data()
    texts: dict[Any, list[str]] = {}

    def reward(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
        texts[size] += [f"{reference['id']} {text}" for text, reference in zip(completions, references, strict=True)]
        return [0.0] * len(completions)

    make = data.make
    data.make = lambda index: make(index) | {"references": [{"id": i} for i in range(6)]}
    scores = []
    for size in (None, 1, 3):
        texts[size] = []
        module = policy(moe_fields, reward=reward, rollout=RolloutConfig(batch_size=size))
        make_trainer(1, limit_val_batches=1).validate(module, data, verbose=False)
        scores.append(sorted(texts[size]))
    assert scores[0] == scores[1] == scores[2] and len(set(scores[0])) == 6


def test_rewards_stay_with_their_completions(moe_fields, prompt_data, make_trainer) -> None:
    """Batches sorted by length, rewards in threads: each row's reward is that of its own text."""
    module = policy(moe_fields, rollout=RolloutConfig(batch_size=8), reward_workers=3)
    seen: list[Any] = []
    original = module._log_rollout
    module._log_rollout = lambda *arguments: (seen.append(arguments), original(*arguments))[1]  # type: ignore[method-assign]
    fit(make_trainer, module, prompt_data())
    batch, rollout, texts, rewards = seen[0]
    assert low_share(texts, []) == pytest.approx(rewards.tolist()) and len(set(rewards.tolist())) > 2
    assert texts == module_texts(rollout, prompt_data())
    prompts = batch["input_ids"].repeat_interleave(4, 0)
    assert torch.equal(rollout.sequences[:, : prompts.shape[1]], prompts)


def module_texts(rollout: Any, data: Any) -> list[str]:
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollout.completions, rollout.completion_mask, strict=True)]
    return data.tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_a_batch_is_scored_while_the_next_is_generated() -> None:
    started, generated = threading.Event(), threading.Event()

    def score(texts: list[str], references: list[Any]) -> dict[str, list[float]]:
        started.set()
        assert generated.wait(30)
        return {"reward": [1.0] * len(texts)}

    workers = RewardWorkers(score, num_workers=1)
    future = workers.submit(["a"], [{}])
    assert started.wait(30) and not future.done()
    generated.set()
    assert future.result(30) == {"reward": [1.0]}
    workers.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_hangs_ends_the_run(moe_fields, prompt_data, make_trainer, workers: int) -> None:
    """Also the process: its thread is none that Python waits for."""
    freed = threading.Event()

    def hangs(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
        with contextlib.suppress(Exception):
            freed.wait()
        return [0.0] * len(completions)

    module = policy(moe_fields, reward=hangs, reward_workers=workers, reward_timeout=0.2)
    message = r"<function .*hangs .* within reward_timeout = 0.2 s, and is at line \d+ of .*test_experience.py.*Mend it"
    with pytest.raises(UserError, match=message):
        fit(make_trainer, module, prompt_data())
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("reward"))
    freed.set()


def test_the_limit_of_a_reward_leaves_alarms_of_others_as_they_were() -> None:
    def alarms(texts: list[str], references: list[Any]) -> dict[str, list[float]]:
        """What math-verify does."""
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return {"reward": [1.0]}

    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert RewardWorkers(alarms, 0, 60.0).submit(["a"], [{}]).result(0) == {"reward": [1.0]}
        time.sleep(0.2)
        assert seen == [signal.SIGALRM] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_reward_that_returns_after_its_alarm_was_swallowed_is_late_all_the_same() -> None:
    def swallows(texts: list[str], references: list[Any]) -> dict[str, list[float]]:
        with contextlib.suppress(BaseException):
            time.sleep(5)
        return {"reward": [0.0]}

    with pytest.raises(UserError, match=r"reward has not scored .* reward_timeout = 0.1 s"):
        RewardWorkers(swallows, 0, 0.1).submit(["a"], [{}])


def test_threads_change_nothing(moe_fields, prompt_data, make_trainer) -> None:
    def slow(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
        time.sleep(0.002 * len(completions[0]))
        return low_share(completions, references)

    runs = []
    for workers in (0, 4):
        module = policy(moe_fields, reward=slow, reward_workers=workers, rollout={"batch_size": 8})
        fit(make_trainer, module, prompt_data(), steps=2)
        runs.append(weights(module))
    assert torch.equal(*runs)


def test_groups_without_contrast_are_drawn_again_and_counted(moe_fields, prompt_data, make_trainer) -> None:
    def rare(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
        return [float(text.split()[:1] in (["w10"], ["w11"], ["w12"])) for text in completions]

    results = []
    for limit in (0, 1, 30):
        module = policy(moe_fields, reward=rare, resample_limit=limit)
        results.append(fit(make_trainer, module, prompt_data())[0])
    never, once, often = results
    assert (
        never["rl/zero_variance_share"] == pytest.approx(once["rl/resampled_groups"] / 6)
        and "rl/resampled_groups" not in never
    )
    assert never["rl/zero_variance_share"] >= once["rl/zero_variance_share"] >= often["rl/zero_variance_share"] == 0
    assert often["rl/resampled_groups"] >= once["rl/resampled_groups"] > 0
    assert never["rl/reward"] == once["rl/reward"] == often["rl/reward"]  # of the first draw, which nothing selected
    stuck = policy(moe_fields, reward=lambda texts, _: [1.0] * len(texts), resample_limit=2)
    assert fit(make_trainer, stuck, prompt_data())[0]["rl/resampled_groups"] == 12


def test_minibatches_share_the_completions_of_a_step(moe_fields, prompt_data, make_trainer) -> None:
    module = policy(moe_fields, minibatches=3, updates_per_rollout=2, max_new_tokens=3)
    sizes: list[int] = []
    losses = module._loss

    def loss(rollout: Any, mask: Any, advantages: Any, old_logps: Any) -> Any:
        sizes.append(len(advantages))
        assert old_logps.shape == rollout.logps.shape
        return losses(rollout, mask, advantages, old_logps)

    module._loss = loss  # type: ignore[method-assign]
    trace = fit(make_trainer, module, prompt_data(), steps=6)
    assert sizes == [8] * 6 and len(trace) == 1
    assert trace[0]["rl/logp_diff"] < 1e-5 and trace[0]["rl/clip_share"] > 0 and trace[0]["rl/routing_agreement"] == 1


def test_minibatches_without_learning_add_up_to_the_batch(moe_fields, prompt_data, make_trainer) -> None:
    """With rate 0 the metrics of two minibatches average to those of the whole, and the weights stay."""
    still = {"optimizer": OptimizerConfig(lr=1e-30, weight_decay=0.0)}
    whole, parts = (
        fit(make_trainer, policy(moe_fields, minibatches=m, **still), prompt_data(), steps=m)[0] for m in (1, 2)
    )
    assert whole["rl/reward"] == parts["rl/reward"]
    assert whole["rl/entropy"] == pytest.approx(parts["rl/entropy"], rel=0.05)


def test_rewards_by_name_are_weighted_and_logged(moe_fields, prompt_data, make_trainer) -> None:
    data = prompt_data()
    make = data.make
    data.make = lambda index: make(index) | {"references": [{"kind": "exact", "answer": "w10"}] * 6}
    module = policy(
        moe_fields,
        reward=None,
        rewards={"reference": 1.0, "format": 0.5},
        reward_options={"format": "w1.*"},
        max_new_tokens=1,
        group_size=32,
    )
    (metrics,) = fit(make_trainer, module, data)
    exact, formatted = metrics["rl/reward_reference"], metrics["rl/reward_format"]
    assert 0 < exact < formatted < 0.5
    assert metrics["rl/reward"] == pytest.approx(exact + 0.5 * formatted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": None, "rewards": {"gsm8": 1.0}}, "reward 'gsm8' is unknown. Did you mean 'gsm8k'"),
        ({"rewards": {"format": 1.0}}, "reward and rewards are both set"),
        ({"reward_options": {"format": "("}}, "reward_options.format is '\\('"),
        ({"minibatches": 0}, "minibatches is 0"),
        ({"resample_limit": -1}, "resample_limit is -1"),
        ({"rollout": {"engine": "vlm"}}, "rollout.engine 'vlm' is unknown. Did you mean 'vllm'"),
        ({"rollout": {"engine": "vllm"}}, "set rollout.url"),
        ({"rollout": {"batch_size": 0}}, "rollout.batch_size is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(moe_fields, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        policy(moe_fields, **options)


def test_more_minibatches_than_completions_are_refused(moe_fields, prompt_data, make_trainer) -> None:
    with pytest.raises(UserError, match="minibatches is 25, and a step has 24 completions"):
        fit(make_trainer, policy(moe_fields, minibatches=25), prompt_data(), steps=25)


def test_routers_agree_with_themselves_and_disagree_with_others(moe_fields, prompt_data, make_trainer) -> None:
    (metrics,) = fit(make_trainer, policy(moe_fields), prompt_data())
    assert metrics["rl/routing_agreement"] == 1
    model, other = build_model(moe_fields, seed=0), build_model(moe_fields, seed=1)
    tokens = torch.arange(24).view(2, 12) + 6
    chosen = []
    for network in (model, other):
        with torch.no_grad(), recorded_routing(network, 2, keep=5) as record:
            network(tokens, output_router_logits=False)
        chosen.append(record.chosen(4))
        assert chosen[-1].shape == (2, 4, 2, 2) and not network.model.layers[0].mlp.experts._forward_pre_hooks
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert routing_agreement(chosen[0], chosen[0], mask) == 1 > routing_agreement(*chosen, mask)
    changed = chosen[0].clone()
    changed[0, 1, 0] = -1
    assert routing_agreement(chosen[0], changed, mask) == 1 - 1 / 16
    mask[0, 1] = False
    assert routing_agreement(chosen[0], changed, mask) == 1


@pytest.mark.parametrize("name", ["max_clip_share", "min_routing_agreement"])
def test_thresholds_stop_by_name(moe_fields, dense_fields, prompt_data, make_trainer, name: str) -> None:
    limit = 2.0 if name.startswith("min") else -1.0
    with pytest.raises(UserError, match=rf"RL stopped at step 0: rl/\w+ is [01], abort.{name} is {limit:g}"):
        fit(make_trainer, policy(moe_fields, abort=AbortThresholds(**{name: limit})), prompt_data())
    if name == "min_routing_agreement":
        with pytest.raises(
            UserError, match="abort.min_routing_agreement is 2, and this run has no rl/routing_agreement"
        ):
            fit(make_trainer, policy(dense_fields, abort={name: limit}), prompt_data())


def test_wall_times_are_logged_and_kept_out_of_the_reproducible_table(
    moe_fields, prompt_data, make_trainer, tmp_path: Path
) -> None:
    for logger, file in (
        (CSVLogger(tmp_path / "stock", name="", version=""), "stock/metrics.csv"),
        (RunCSVLogger(tmp_path / "own"), "own/timings.csv"),
    ):
        make_trainer(2, logger=logger, log_every_n_steps=1).fit(policy(moe_fields), prompt_data())
        assert "time/rollout_share" in (tmp_path / file).read_text().splitlines()[0].split(",")
    own = (tmp_path / "own" / "metrics.csv").read_text().splitlines()
    assert "rl/reward" in own[0] and "time/" not in own[0] and len(own) == 3
    rows = [line.split(",") for line in (tmp_path / "own" / "timings.csv").read_text().splitlines()]
    shares = [float(row[rows[0].index("time/rollout_share")]) for row in rows[1:]]
    assert len(shares) == 2 and all(0 < share < 1 for share in shares)

"""Generation: what it reads, and how a reinforcement-learning step is put together."""

from __future__ import annotations

import dataclasses

import pytest
from paper_models import hardware, step_model, training

from lightning_nvfp4.estimate.rollout import rl_step
from lightning_nvfp4.estimate.workload import Rollout

_ROLLOUT = Rollout(
    gpus_per_engine=1, sequences_per_gpu=4, prompt_length=64, mean_response=128, max_response=256, forward_passes=1
)
_NO_FLOOR = hardware(dense_tflops=dict.fromkeys(("bf16", "mxfp8", "nvfp4"), 1e12))


def test_decoding_reads_each_weight_in_the_bits_of_its_forward() -> None:
    def seconds(name):
        found = rl_step(step_model(name, _NO_FLOOR), training(), _ROLLOUT).decode
        return sum(value for part, value in found.seconds.items() if part.startswith("gemm"))

    batch = 2  # 4 sequences, half of the steps each
    dense, kept = 2 * (2 * 64 * 64 + 2 * 64 * 32), 2 * 8 * 64 + 128 * 64
    experts = 2 * 8 * 3 * 48 * 64 * (1 - (1 - 2 / 8) ** batch)
    assert seconds("bf16-gemm") == pytest.approx(256 * 2 * (dense + kept + experts) / 1e12)
    assert seconds("mxfp8") == pytest.approx(256 * (8.25 / 8 * (dense + experts) + 2 * kept) / 1e12)
    assert seconds("nvfp4-hybrid") == pytest.approx(256 * (8.25 / 8 * dense + 4.5 / 8 * experts + 2 * kept) / 1e12)


def test_the_cache_is_read_once_a_token() -> None:
    found = rl_step(step_model(gpu=_NO_FLOOR), training(), _ROLLOUT).decode.seconds["kv cache"]
    layers, batch, context, numbers = 2, 2, 64 + 128 / 2, 2 * 2 * 16
    assert found == pytest.approx(256 * layers * batch * context * numbers * 2 / 1e12)
    half = dataclasses.replace(_ROLLOUT, kv_bits=8)
    assert rl_step(step_model(gpu=_NO_FLOOR), training(), half).decode.seconds["kv cache"] == pytest.approx(found / 2)


def test_the_longest_response_sets_the_number_of_steps() -> None:
    long = dataclasses.replace(_ROLLOUT, max_response=512, sequences_per_gpu=8)  # the same mean batch
    decode = [rl_step(step_model(gpu=_NO_FLOOR), training(), one).decode for one in (_ROLLOUT, long)]
    assert decode[1].total == pytest.approx(2 * decode[0].total)


def test_a_step_trains_on_every_token_and_adds_the_forwards() -> None:
    model = step_model()
    batch = training(tokens=4 * (64 + 128) // 2, sequence_length=192)
    step = rl_step(model, batch, _ROLLOUT)
    assert step.training.total == pytest.approx(
        model.step(dataclasses.replace(batch, micro_batches=2)).total + 2 * model.forward(batch).total
    )
    assert step.total == pytest.approx(step.times.total)
    none = rl_step(model, batch, dataclasses.replace(_ROLLOUT, forward_passes=0))
    assert none.training.total == pytest.approx(model.step(dataclasses.replace(batch, micro_batches=2)).total)


def test_more_bandwidth_and_more_gpus_make_decoding_shorter() -> None:
    slow = rl_step(step_model(gpu=hardware()), training(), _ROLLOUT).decode.total
    fast = rl_step(step_model(gpu=hardware(memory_tb_s=2.0)), training(), _ROLLOUT).decode.total
    assert fast < slow

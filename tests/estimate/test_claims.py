"""What a claim needs, put back into the model, gives the claim."""

from __future__ import annotations

import dataclasses

import pytest
from paper_models import counts, hardware, training

from lightning_nvfp4.estimate.claims import pretraining_claim, rl_claim
from lightning_nvfp4.estimate.parts import Times
from lightning_nvfp4.estimate.rollout import RlStep
from lightning_nvfp4.estimate.stacks import FUSED, TE_TODAY
from lightning_nvfp4.estimate.step_model import StepModel

_GPU = hardware(memory_tb_s=50.0)


def _arms(gpu=_GPU, stack=FUSED, codec="none"):
    return StepModel(counts("mxfp8"), gpu, stack), StepModel(counts("nvfp4-hybrid"), gpu, stack, codec)


def test_the_needed_speed_gives_the_claim() -> None:
    base, arm = _arms(hardware(memory_tb_s=1e9))
    claim = pretraining_claim(base, arm, training(), claimed=0.02)
    assert claim.speed == pytest.approx(2) and claim.needed_speed is not None
    rates = {**_GPU.dense_tflops, "nvfp4": 2000.0 * claim.needed_speed}
    after = pretraining_claim(*_arms(hardware(memory_tb_s=1e9, dense_tflops=rates)), training(), claimed=0.02)
    assert after.modelled == pytest.approx(0.02)
    assert after.needed_speed == pytest.approx(after.speed)
    assert after.needed_share == pytest.approx(after.share)


def test_the_bound_is_that_of_infinite_speed_without_any_extra_pass() -> None:
    base, arm = _arms(hardware(memory_tb_s=1e9))
    claim = pretraining_claim(base, arm, training())
    rates = {**_GPU.dense_tflops, "nvfp4": 1e15}
    free = pretraining_claim(*_arms(hardware(memory_tb_s=1e9, dense_tflops=rates)), training())
    assert free.modelled == pytest.approx(claim.bound, rel=1e-6)
    assert pretraining_claim(base, arm, training(), claimed=claim.bound * 1.01).needed_speed is None


@pytest.mark.parametrize("batch", [training(), training(recompute=True, micro_batches=3)])
def test_a_claim_of_what_is_modelled_needs_what_is_there(batch) -> None:
    base, arm = _arms()
    modelled = pretraining_claim(base, arm, batch).modelled
    claim = pretraining_claim(base, arm, batch, claimed=modelled)
    assert modelled > 0
    assert claim.needed_speed == pytest.approx(claim.speed)
    assert claim.needed_share == pytest.approx(claim.share)


def test_the_wire_is_no_gain_of_the_gemms() -> None:
    spread = training(gpus=8, expert_parallel=8)
    plain, packed = (pretraining_claim(*_arms(codec=codec), spread) for codec in ("none", "s2f6"))
    assert packed.modelled > plain.modelled
    assert packed.share == pytest.approx(plain.share)


def test_no_share_is_enough_where_the_loop_eats_the_gain() -> None:
    claim = pretraining_claim(*_arms(hardware(), TE_TODAY), training())
    assert claim.modelled < 0 and claim.needed_share is None


def _rl(rollout: float, training_seconds: float) -> RlStep:
    def one(seconds: float) -> Times:
        return Times({**Times().seconds, "gemm bf16": seconds})

    return RlStep(one(0), one(rollout), one(training_seconds))


def test_the_rl_claim_by_hand() -> None:
    claim = rl_claim(_rl(60, 40), _rl(40, 40), claimed=0.25)
    assert claim.modelled == pytest.approx(0.25)
    assert (claim.share, claim.rollout, claim.training) == pytest.approx((0.6, 1.5, 1.0))
    assert claim.needed_rollout == pytest.approx(1.5)
    assert claim.needed_share == pytest.approx(0.6)
    assert rl_claim(_rl(60, 40), _rl(40, 40), claimed=1.0).needed_share is None
    assert rl_claim(_rl(10, 90), _rl(5, 90), claimed=0.2).needed_rollout is None
    assert rl_claim(_rl(60, 40), _rl(40, 20), claimed=0.5).needed_share == 0  # training alone gains more
    assert rl_claim(_rl(60, 40), _rl(80, 50), claimed=0.2).needed_share is None


def test_the_claims_are_those_of_dataclasses_with_every_field_known() -> None:
    claim = pretraining_claim(*_arms(), training())
    assert claim.claimed == 0.08
    assert all(isinstance(value, float) for name, value in dataclasses.asdict(claim).items() if "needed" not in name)

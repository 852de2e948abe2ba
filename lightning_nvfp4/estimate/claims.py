"""What a claimed speed-up needs to hold: Amdahl's law, solved for the share and for the speed of 4-bit GEMMs."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_nvfp4.estimate.parts import Times
from lightning_nvfp4.estimate.rollout import RlStep
from lightning_nvfp4.estimate.stacks import pair_format
from lightning_nvfp4.estimate.step_model import StepModel, role_operands
from lightning_nvfp4.estimate.workload import Training

CLAIMED = {"pretraining": 0.08, "rl": 0.20}
"""Gains over an 8-bit run that a hybrid of NVFP4 forward and MXFP8 backward is said to have."""


@dataclass(frozen=True)
class PretrainingClaim:
    """A claimed gain of a training step over the 8-bit baseline.

    Attributes:
        claimed, modelled: time of the baseline over the arm's, minus 1.
        share: of the baseline's step, the part in GEMMs that the arm runs in 4 bits.
        bound: the gain if those GEMMs took no time and nothing else changed.
        speed: how many times as fast the arm runs those GEMMs.
        needed_speed: what that would have to be for the claim, all else as modelled; ``None``: no speed is enough.
        needed_share: the share that the claim needs, each such GEMM gaining what is modelled and the wire as it is;
            ``None``: no share is enough.
    """

    claimed: float
    modelled: float
    share: float
    bound: float
    speed: float
    needed_speed: float | None
    needed_share: float | None


@dataclass(frozen=True)
class RlClaim:
    """A claimed gain of a reinforcement-learning step over the 8-bit baseline.

    Attributes:
        claimed, modelled: time of the baseline over the arm's, minus 1.
        share: of the baseline's step, the rollout's.
        rollout, training: how many times as fast the arm is in each.
        needed_rollout: rollout speed-up that the claim needs, the rest as modelled; ``None``: none is enough.
        needed_share: share of the rollout that the claim needs at the modelled speed-ups; ``None``: none is enough.
    """

    claimed: float
    modelled: float
    share: float
    rollout: float
    training: float
    needed_rollout: float | None
    needed_share: float | None


def pretraining_claim(
    baseline: StepModel, arm: StepModel, training: Training, claimed: float = CLAIMED["pretraining"]
) -> PretrainingClaim:
    """Return what the claim needs for `arm` over `baseline`, two precisions of one model on one hardware."""
    base_times, arm_times = baseline.step(training), arm.step(training)
    before, after = base_times.total, arm_times.total
    wire = arm_times.seconds["all-to-all"] - base_times.seconds["all-to-all"]
    slow, fast = (_four_bit_gemms(model, arm, training) for model in (baseline, arm))
    target = before / (1 + claimed)
    room = target - (after - fast)  # seconds left for the 4-bit GEMMs
    saved = (before + wire - after) / slow if slow else 0.0  # of each second of such a GEMM, its passes included
    return PretrainingClaim(
        claimed,
        modelled=before / after - 1,
        share=slow / before,
        bound=before / (before - slow) - 1,
        speed=slow / fast if fast else 1.0,
        needed_speed=slow / room if room > 0 and slow else None,
        needed_share=_possible((before + wire - target) / before / saved) if saved > 0 else None,
    )


def rl_claim(baseline: RlStep, arm: RlStep, claimed: float = CLAIMED["rl"]) -> RlClaim:
    """Return what the claim needs for `arm` over `baseline`."""
    share = baseline.rollout / baseline.total
    rollout, training = baseline.rollout / arm.rollout, baseline.training.total / arm.training.total
    room = baseline.total / (1 + claimed) - arm.training.total
    needed = None
    if rollout >= 1 + claimed:
        rest = 1 / (1 + claimed) - 1 / training  # above zero where training alone is fast enough
        needed = 0.0 if rest >= 0 else rest / (1 / rollout - 1 / training)
    return RlClaim(
        claimed,
        modelled=baseline.total / arm.total - 1,
        share=share,
        rollout=rollout,
        training=training,
        needed_rollout=baseline.rollout / room if room > 0 else None,
        needed_share=needed,
    )


def _possible(share: float) -> float | None:
    """Return a share of a whole, or ``None`` where it would have to be more."""
    return max(0.0, share) if share <= 1 else None


def _four_bit_gemms(model: StepModel, arm: StepModel, training: Training) -> float:
    """Return the seconds `model` spends in a step on the GEMMs that `arm` runs on 4-bit tensor cores."""
    times = Times()
    for own, other in zip(model.architecture.gemms, arm.architecture.gemms, strict=True):
        for role in ("fprop", "dgrad", "wgrad"):
            kind = pair_format(*role_operands(other.recipe, role))
            if kind == "nvfp4" and arm.hardware.native(kind):
                for _ in range(2 if training.recompute and role == "fprop" and not own.head else 1):
                    model.matmul(times, own, role, training)
    seconds = sum(times.seconds[part] for part in times.seconds if part.startswith("gemm"))
    return seconds * training.micro_batches / (training.tensor_parallel * training.pipeline_parallel)

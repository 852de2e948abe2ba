"""What is run: sizes of a training step and of generation, and how the model is spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.estimate.settings import load, number


@dataclass(frozen=True)
class Training:
    """A training step, balanced over GPUs and experts.

    Attributes:
        gpus: all GPUs of the run; parameters and optimizer state are sharded over them.
        tokens: tokens of one micro-batch of one model replica.
        sequence_length: tokens that attend to one another.
        micro_batches: micro-batches of an optimizer step.
        expert_parallel: GPUs that share the experts of a layer.
        tensor_parallel, pipeline_parallel, virtual_stages: as in Megatron; 1 = none.
        sharded: parameters are gathered for every micro-batch (FSDP2); otherwise once for an optimizer step.
        recompute: every block's forward runs again in the backward.
        overlap: share of the all-to-all hidden behind computation.
    """

    gpus: int = number("the number of GPUs", least=1)
    tokens: int = number("tokens of one micro-batch of one model replica", least=1)
    sequence_length: int = number("tokens of one sequence", least=1)
    micro_batches: int = number("micro-batches of an optimizer step", least=1)
    expert_parallel: int = number("the number of GPUs that share a layer's experts", default=1, least=1)
    tensor_parallel: int = number("the number of GPUs that share a matrix", default=1, least=1)
    pipeline_parallel: int = number("the number of pipeline stages", default=1, least=1)
    virtual_stages: int = number("the number of parts of a pipeline stage", default=1, least=1)
    sharded: bool = True
    recompute: bool = False
    overlap: float = number("the share of the all-to-all hidden behind computation", default=0.0, least=0, most=1)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the dense layers."""
        return max(1, self.gpus // (self.tensor_parallel * self.pipeline_parallel))


@dataclass(frozen=True)
class Rollout:
    """Generation of a reinforcement-learning step, on the GPUs that also train.

    Attributes:
        gpus_per_engine: GPUs that share the weights of one inference engine, all to all.
        sequences_per_gpu: responses generated in one step, divided by the number of GPUs.
        prompt_length, mean_response, max_response: tokens; an engine decodes as many steps as its longest response.
        kv_bits: bits of one cached number.
        forward_passes: forward passes over all tokens for log-probabilities, besides the one that trains.
    """

    gpus_per_engine: int = number("the number of GPUs of one inference engine", least=1)
    sequences_per_gpu: int = number("responses a step for each GPU", least=1)
    prompt_length: int = number("tokens of a prompt", least=1)
    mean_response: int = number("mean tokens of a response", least=1)
    max_response: int = number("tokens of the longest response", least=1)
    kv_bits: int = number("bits of one number in the KV cache", default=16, least=4, most=32)
    forward_passes: int = number("extra forward passes for log-probabilities", default=1, least=0)


@dataclass(frozen=True)
class Workload:
    """Pretraining, and reinforcement learning on `rl_training`'s step with `rollout`'s tokens."""

    pretraining: Training
    rl_training: Training
    rollout: Rollout


def load_training(content: Any, where: str, path: str) -> Training:
    """Return the training step of a YAML mapping.

    Raises:
        UserError: see `lightning_nvfp4.estimate.settings.load`; or GPUs that cannot be divided so.
    """
    training = load(Training, content, where, path)
    for name in ("expert_parallel", "tensor_parallel", "pipeline_parallel"):
        if training.gpus % getattr(training, name):
            raise UserError(
                f"{where}: {path}.{name} = {getattr(training, name)} must divide {path}.gpus = {training.gpus}: "
                "change one of them."
            )
    return training


def load_workload(content: Any, where: str) -> Workload:
    """Return the workload of a YAML mapping with ``pretraining``, ``rl_training`` and ``rollout``.

    Raises:
        UserError: see `load_training`; or a mean response above the longest one.
    """
    workload = load(Workload, content, where)
    for path in ("pretraining", "rl_training"):
        load_training(content[path], where, path)
    check_rollout(workload.rollout, where)
    return workload


def check_rollout(rollout: Rollout, where: str) -> None:
    """Raise a `UserError` for a mean response above the longest one."""
    if rollout.mean_response > rollout.max_response:
        raise UserError(
            f"{where}: rollout.mean_response = {rollout.mean_response} must not exceed rollout.max_response = "
            f"{rollout.max_response}: change one of them."
        )

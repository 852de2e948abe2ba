"""Seconds of generation, and of a reinforcement-learning step: rollout, log-probabilities, training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_nvfp4.estimate.architecture import Gemm
from lightning_nvfp4.estimate.parts import Times
from lightning_nvfp4.estimate.stacks import operand_bytes, pair_format
from lightning_nvfp4.estimate.step_model import StepModel, gemm_part
from lightning_nvfp4.estimate.workload import Rollout, Training

# Kernels of one decoded token in one layer besides its GEMMs: norms, rotary, cache, attention, activation, routing.
_KERNELS_OF_A_LAYER = 8


@dataclass(frozen=True)
class RlStep:
    """Seconds of the phases of one step."""

    prefill: Times
    decode: Times
    training: Times

    @property
    def rollout(self) -> float:
        """Seconds of generation."""
        return self.prefill.total + self.decode.total

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.rollout + self.training.total

    @property
    def times(self) -> Times:
        """Seconds by part."""
        return self.prefill + self.decode + self.training


def rl_step(model: StepModel, training: Training, rollout: Rollout) -> RlStep:
    """Return the seconds of one step, every GPU generating first and training then.

    The responses of a step are spread evenly over the GPUs; a training step has as many micro-batches as they fill.
    """
    tokens = rollout.sequences_per_gpu * (rollout.prompt_length + rollout.mean_response)
    per_replica = tokens * training.tensor_parallel * training.pipeline_parallel
    micro_batches = max(1, round(per_replica / training.tokens))
    training = replace(training, micro_batches=micro_batches)
    passes = model.forward(training).scaled(micro_batches * rollout.forward_passes)
    split = training.tensor_parallel * training.pipeline_parallel
    return RlStep(
        prefill=_prefill(model, rollout),
        decode=_decode(model, rollout),
        training=model.step(training) + passes.scaled(1 / split),
    )


def _prefill(model: StepModel, rollout: Rollout) -> Times:
    tokens = rollout.sequences_per_gpu * rollout.prompt_length
    batch = Training(gpus=1, tokens=tokens, sequence_length=rollout.prompt_length, micro_batches=1)
    return model.forward(batch, head=False)


def _decode(model: StepModel, rollout: Rollout) -> Times:
    """Return the seconds of all decode steps; short responses leave the batch before the longest one ends."""
    batch = rollout.sequences_per_gpu * rollout.gpus_per_engine * rollout.mean_response / rollout.max_response
    times = Times()
    hardware, model_counts = model.hardware, model.architecture
    bandwidth = hardware.bandwidth(hardware.efficiency.memory)
    shortest = hardware.kernel_us * 1e-6
    for gemm in model_counts.gemms:
        recipe = gemm.recipe
        kind = pair_format(recipe.fprop_input, recipe.fprop_weight) if recipe else "bf16"
        weights = _weights_read(gemm, batch) * operand_bytes(kind, hardware)
        flops = 2 * batch * gemm.macs
        seconds = max(weights / bandwidth, flops / hardware.flops(kind)) / rollout.gpus_per_engine
        times.add(gemm_part(kind, hardware), seconds)
        quantizes = recipe is not None and recipe.fprop_input is not None
        times.add("latency", max(0.0, shortest - seconds) + (shortest if quantizes else 0.0))
    context = rollout.prompt_length + rollout.mean_response / 2
    for layer in model_counts.attention:
        seen = min(context, layer.window) if layer.window else context
        moved = batch * seen * layer.kv_numbers * rollout.kv_bits / 8
        times.add("kv cache", moved / bandwidth / rollout.gpus_per_engine)
    for layer in model_counts.state_space:  # the state is read and written in FP32
        times.add("kv cache", 8 * batch * layer.inner * layer.state / bandwidth / rollout.gpus_per_engine)
    layers = len(model_counts.attention) + len(model_counts.state_space)
    times.add("latency", layers * _KERNELS_OF_A_LAYER * shortest)
    if rollout.gpus_per_engine > 1:  # two exchanges a layer, each as small as a kernel
        times.add("all-to-all", 2 * layers * shortest)
    return times.scaled(rollout.max_response)


def _weights_read(gemm: Gemm, batch: float) -> float:
    """Return how many weights one decode step reads: experts only where a token of the batch visits them."""
    if not gemm.routed:
        return gemm.parameters
    visited = 1 - (1 - gemm.visits / gemm.experts) ** batch
    return gemm.parameters * visited

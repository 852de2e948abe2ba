"""Seconds of a training step, from counts of multiply-adds and bytes.

Each kernel takes the longest of three times: multiply-adds over the tensor cores' rate, bytes over the memory
bandwidth, and the shortest time of a kernel. Kernels follow one another; only parameter traffic hides behind them.
Token counts are those of one GPU; experts are balanced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_nvfp4.estimate.architecture import Architecture, Gemm
from lightning_nvfp4.estimate.hardware import BF16, Hardware
from lightning_nvfp4.estimate.parts import Times
from lightning_nvfp4.estimate.stacks import (
    BF16_BYTES,
    FP32_BYTES,
    LOOP_BYTES,
    LOOP_OPERATIONS,
    Pass,
    Stack,
    operand_bytes,
    pair_format,
    quantize_passes,
)
from lightning_nvfp4.estimate.workload import Training
from lightning_nvfp4.formats import BLOCK_FORMATS
from lightning_nvfp4.recipe import OPERANDS, GemmRecipe, QuantSpec

CODECS = ("none", "mxfp8", "nvfp4", "s2f6")
EXPERT_ROWS = 128
"""Rows to which each expert's tokens are padded for quantized GEMMs. Source: Transformer Engine, design of MXFP8."""

BF16_RECIPE = GemmRecipe()
# AdamW: reads master, gradient and two moments in FP32, writes master and moments, and the BF16 copy for the GEMMs;
# the gradient is read once more for its norm.
_OPTIMIZER_BYTES = 8 * FP32_BYTES + BF16_BYTES


@dataclass(frozen=True)
class StepModel:
    """One model in one precision on one GPU type under one stack.

    Attributes:
        architecture: counts, with the recipe of every GEMM.
        hardware: rates.
        stack: passes and loops.
        codec: wire format of the all-to-all, all four legs.
    """

    architecture: Architecture
    hardware: Hardware
    stack: Stack
    codec: str = "none"

    def step(self, training: Training) -> Times:
        """Return the seconds of one optimizer step on one GPU."""
        layers = self.micro_batch(training).scaled(1 / (training.tensor_parallel * training.pipeline_parallel))
        times = layers.scaled(training.micro_batches) + self._per_step(training)
        times.add("parallel", self._exposed_parameters(training, layers) + self._matrix_exchange(training))
        bubble = (training.pipeline_parallel - 1) / (training.micro_batches * training.virtual_stages)
        times.add("parallel", bubble * layers.total * training.micro_batches)
        return times

    def micro_batch(self, training: Training) -> Times:
        """Return the seconds of forward and backward of one micro-batch, as if one GPU had all of the model."""
        times = self.forward(training, training_pass=True)
        if training.recompute:
            times = times + self.forward(training, training_pass=True, head=False)
        for gemm in self.architecture.gemms:
            for role in ("dgrad", "wgrad"):
                self.matmul(times, gemm, role, training)
            recipe = gemm.recipe or BF16_RECIPE
            passes = quantize_passes(recipe.dgrad_grad_output, recipe.wgrad_grad_output, self.hardware, self.stack)
            self._quantize(times, passes, self._rows(gemm, training) * gemm.n)
        self._mixing(times, training, backward=True)
        self._elementwise(times, training, backward=True)
        self._all_to_all(times, training)
        return times

    def forward(self, training: Training, training_pass: bool = False, head: bool = True) -> Times:
        """Return the seconds of a forward.

        Args:
            training: the micro-batch.
            training_pass: operands of the backward are quantized too.
            head: the logits are computed.
        """
        times = Times()
        seen: set[str] = set()
        for gemm in self.architecture.gemms:
            if gemm.head and not head:
                continue
            recipe = gemm.recipe or BF16_RECIPE
            self.matmul(times, gemm, "fprop", training)
            if self.stack.shares_inputs and gemm.input_id in seen:
                continue
            seen.add(gemm.input_id)
            columns = recipe.wgrad_input if training_pass else None
            dequantized = recipe.source == "dequantized"
            passes = quantize_passes(recipe.fprop_input, columns, self.hardware, self.stack, dequantized)
            self._quantize(times, passes, self._rows(gemm, training) * gemm.k)
        self._mixing(times, training, backward=False)
        self._elementwise(times, training, backward=False)
        self._all_to_all(times, training)
        return times

    def _rows(self, gemm: Gemm, training: Training) -> float:
        """Return the rows of a GEMM, padding of quantized experts included."""
        rows = training.tokens * gemm.visits
        if not gemm.routed or not gemm.quantized:
            return rows
        experts = gemm.experts / training.expert_parallel
        return EXPERT_ROWS * math.ceil(rows / experts / EXPERT_ROWS) * experts

    def matmul(self, times: Times, gemm: Gemm, role: str, training: Training) -> None:
        """Add the GEMM of one role (``fprop``, ``dgrad``, ``wgrad``), and what scaling its output by rows costs."""
        rows = self._rows(gemm, training)
        a, b = role_operands(gemm.recipe, role)
        kind = pair_format(a, b)
        hardware = self.hardware
        weight = gemm.parameters / (training.expert_parallel if gemm.routed else 1)
        width = operand_bytes(kind, hardware)
        operands, output, output_bytes = {
            "fprop": (rows * gemm.k + weight, rows * gemm.n, BF16_BYTES),
            "dgrad": (rows * gemm.n + weight, rows * gemm.k, BF16_BYTES),
            "wgrad": (rows * (gemm.n + gemm.k), weight, 2 * FP32_BYTES),  # accumulates in FP32
        }[role]
        bandwidth = hardware.bandwidth(hardware.efficiency.memory)
        seconds = max(
            2 * rows * gemm.n * gemm.k / hardware.flops(kind),
            (operands * width + output * output_bytes) / bandwidth,
            hardware.kernel_us * 1e-6,
        )
        times.add(gemm_part(kind, hardware), seconds)
        row_scaled = any(spec is not None and spec.tensor_scale == "row" for spec in (a, b))
        if self.stack.loops_row_scaled and row_scaled and hardware.native(kind):
            experts = gemm.experts / training.expert_parallel if gemm.routed else 1
            elementwise = output * LOOP_BYTES / bandwidth
            launches = experts * LOOP_OPERATIONS * hardware.host_us * 1e-6 if gemm.routed else 0.0
            times.add("row scaling", elementwise + max(0.0, launches - elementwise - seconds))

    def _quantize(self, times: Times, passes: list[Pass], numbers: float) -> None:
        efficiency = self.hardware.efficiency
        for one in passes:
            share = efficiency.quantize_stochastic if one.stochastic else efficiency.quantize
            self._stream(times, "quantize", numbers * one.bytes, share)

    def _stream(self, times: Times, part: str, count: float, share: float | None = None) -> None:
        """Add one kernel that moves `count` bytes."""
        bandwidth = self.hardware.bandwidth(share or self.hardware.efficiency.memory)
        times.add(part, max(count / bandwidth, self.hardware.kernel_us * 1e-6))

    def _mixing(self, times: Times, training: Training, backward: bool) -> None:
        tokens, rate = training.tokens, self.hardware.attention_flops(backward)
        for layer in self.architecture.attention:
            context = training.sequence_length / 2  # causal
            if layer.window:
                context = min(context, layer.window)
            flops = 2 * tokens * context * layer.heads * (layer.qk_dim + layer.v_dim)
            times.add("attention", flops * (2.5 if backward else 1.0) / rate)
        for layer in self.architecture.state_space:
            # Dao and Gu, arXiv:2405.21060 section 6: products within chunks (causal half) and with the states.
            inside = layer.chunk * (layer.groups * layer.state + layer.inner)
            flops = tokens * (inside + 4 * layer.state * layer.inner)
            moved = BF16_BYTES * tokens * (6 * layer.inner + 4 * layer.groups * layer.state)  # convolution, scan, gate
            factor = 2.0 if backward else 1.0
            bandwidth = self.hardware.bandwidth(self.hardware.efficiency.memory)
            times.add("attention", factor * max(flops / rate, moved / bandwidth))

    def _elementwise(self, times: Times, training: Training, backward: bool) -> None:
        """Add the passes over activations: bytes for each number of BF16 read and written by fused kernels."""
        tokens, model = training.tokens, self.architecture
        for numbers in model.norms:
            # With the residual: reads both, writes the sum and the norm; the backward reads three, writes one and adds.
            bytes_each = (5 if backward else 4) if numbers == model.hidden else (3 if backward else 2)
            self._stream(times, "elementwise", tokens * numbers * bytes_each * BF16_BYTES)
        for layer in model.attention:  # rotary embedding in place
            rotated = layer.heads * layer.qk_dim + layer.kv_numbers / 2
            self._stream(times, "elementwise", tokens * rotated * 2 * BF16_BYTES)
        for gemm in model.gemms:
            if gemm.activation:
                inputs = gemm.activation
                numbers = (2 * inputs + 1) if backward else (inputs + 1)
                self._stream(times, "elementwise", tokens * gemm.visits * gemm.k * numbers * BF16_BYTES)
            if gemm.routed and gemm.activation:  # once a layer: permute and unpermute
                moved = 2 * (1 + gemm.visits) * gemm.n * BF16_BYTES
                routing = 6 * gemm.experts * FP32_BYTES
                self._stream(times, "elementwise", tokens * (moved + routing))
            if gemm.head:
                self._stream(times, "elementwise", tokens * model.vocabulary * 1.5 * BF16_BYTES)

    def _all_to_all(self, times: Times, training: Training) -> None:
        """Add dispatch and combine of one direction, and the passes that encode and decode them."""
        ranks = training.expert_parallel
        if ranks == 1:
            return
        for gemm in self.architecture.gemms:
            if not (gemm.routed and gemm.activation):
                continue
            numbers = training.tokens * gemm.visits * gemm.n
            width = wire_bytes(self.codec)
            leg = self.hardware.exchange_seconds(numbers * width, ranks)
            times.add("all-to-all", 2 * leg * (1 - training.overlap))
            if self.codec != "none":
                for _ in range(4):
                    self._stream(times, "all-to-all", numbers * (BF16_BYTES + width), self.hardware.efficiency.quantize)

    def _per_step(self, training: Training) -> Times:
        """Return what happens once for an optimizer step: the optimizer, and the weights' quantization."""
        times = Times()
        local = self.architecture.parameters / training.gpus
        self._stream(times, "optimizer", local * _OPTIMIZER_BYTES)
        split = training.tensor_parallel * training.pipeline_parallel
        for gemm in self.architecture.gemms:
            if gemm.recipe is None:
                continue
            recipe = gemm.recipe
            passes = quantize_passes(
                recipe.fprop_weight, recipe.dgrad_weight, self.hardware, self.stack, recipe.source == "dequantized"
            )
            count = gemm.parameters / (training.expert_parallel if gemm.routed else 1)
            self._quantize(times, passes, count / split)
        return times

    def _exposed_parameters(self, training: Training, layers: Times) -> float:
        """Return the seconds of a step's parameter traffic that the computation of its micro-batches does not hide."""
        hardware, model = self.hardware, self.architecture
        dense = (model.parameters - model.expert_parameters) / (training.tensor_parallel * training.pipeline_parallel)
        share = training.expert_parallel * training.pipeline_parallel
        seconds = 0.0
        for numbers, ranks in (
            (dense, training.replicas),
            (model.expert_parameters / share, max(1, training.gpus // share)),
        ):
            if (
                ranks > 1
            ):  # gathered in BF16, for forward and backward where they are sharded; gradients reduced in BF16
                seconds += (3 if training.sharded else 2) * BF16_BYTES * numbers / hardware.gather_rate(ranks)
        if training.sharded:
            return max(0.0, seconds - layers.total) * training.micro_batches
        return max(0.0, seconds - layers.total * training.micro_batches)

    def _matrix_exchange(self, training: Training) -> float:
        """Return the seconds of a step's tensor-parallel traffic: gather and scatter around two pairs of GEMMs."""
        ranks, model = training.tensor_parallel, self.architecture
        if ranks == 1:
            return 0.0
        layers = (len(model.attention) + len(model.state_space)) / training.pipeline_parallel
        exchanges = 10  # 4 forward, 4 backward, 2 more for wgrad
        moved = exchanges * layers * training.tokens * model.hidden * BF16_BYTES * (ranks - 1) / ranks
        return training.micro_batches * moved / self.hardware.gather_rate(ranks)


def role_operands(recipe: GemmRecipe | None, role: str) -> tuple[QuantSpec | None, QuantSpec | None]:
    """Return the quantizers of the two operands of a GEMM, by its role."""
    names = next(OPERANDS[i : i + 2] for i in (0, 2, 4) if OPERANDS[i].startswith(role))
    return getattr(recipe, names[0], None), getattr(recipe, names[1], None)


def gemm_part(kind: str, hardware: Hardware) -> str:
    """Return the part a GEMM of this format counts under."""
    if kind == BF16 or not hardware.native(kind):
        return "gemm bf16"
    return "gemm 4-bit" if BLOCK_FORMATS[kind].codes_per_byte == 2 else "gemm 8-bit"


def wire_bytes(codec: str) -> float:
    """Return the bytes of one number on the wire."""
    return BF16_BYTES if codec == "none" else BLOCK_FORMATS[codec].bits_per_element / 8

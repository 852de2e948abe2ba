"""Laws of the step model: what has to hold whatever the rates are."""

from __future__ import annotations

import dataclasses
import math

import pytest
from paper_models import ALL_BLOCKS, counts, hardware, step_model, training

from lightning_nvfp4 import load_recipe
from lightning_nvfp4.estimate.parts import PARTS
from lightning_nvfp4.estimate.stacks import FUSED, LOOP_BYTES, STACKS, TE_BUILT_IN, TE_TODAY, quantize_passes
from lightning_nvfp4.estimate.step_model import StepModel
from lightning_nvfp4.recipe import PRESETS, QuantSpec

_FAST = hardware(memory_tb_s=1e9)  # only multiply-adds take time


def _gemm_seconds(times) -> float:
    return sum(seconds for part, seconds in times.seconds.items() if part.startswith("gemm"))


def test_bf16_gemms_take_three_times_the_forward_counted_by_hand() -> None:
    macs = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 8 * 64 + 2 * 3 * 48 * 64) + 128 * 64
    found = step_model("bf16-gemm", _FAST).step(training())
    assert _gemm_seconds(found) == pytest.approx(3 * 2 * macs * 4096 / 1000e12)
    assert found.seconds["gemm bf16"] == _gemm_seconds(found)
    assert found.seconds["quantize"] == 0


def test_a_hybrid_runs_the_experts_forward_in_4_bits_and_all_else_quantized_in_8() -> None:
    found = step_model("nvfp4-hybrid", _FAST).step(training())
    experts, attention, kept = 2 * 2 * 3 * 48 * 64, 2 * (2 * 64 * 64 + 2 * 64 * 32), 2 * 8 * 64 + 128 * 64
    assert found.seconds["gemm 4-bit"] == pytest.approx(2 * experts * 4096 / 4000e12)
    assert found.seconds["gemm 8-bit"] == pytest.approx(2 * (2 * experts + 3 * attention) * 4096 / 2000e12)
    assert found.seconds["gemm bf16"] == pytest.approx(2 * 3 * kept * 4096 / 1000e12)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_parts_sum_to_the_total_and_shares_to_one(name, stack) -> None:
    found = step_model(name, stack=stack, codec="s2f6").step(training(gpus=8, expert_parallel=4, recompute=True))
    assert set(found.seconds) == set(PARTS)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.total)
    assert math.fsum(found.shares().values()) == pytest.approx(1)
    assert min(found.seconds.values()) >= 0


def test_time_is_proportional_to_tokens_and_to_micro_batches() -> None:
    model = step_model(gpu=hardware(kernel_us=1e-12))
    once = model.micro_batch(training())
    twice = model.micro_batch(training(tokens=2 * 4096))
    mixed = {"gemm 4-bit", "gemm 8-bit", "gemm bf16"}  # weights are read whatever the number of tokens
    for part in PARTS:
        assert twice.seconds[part] == pytest.approx(2 * once.seconds[part], rel=0.35 if part in mixed else 1e-9)
    fast = StepModel(model.architecture, _FAST, FUSED)
    assert fast.micro_batch(training(tokens=8192)).total == pytest.approx(2 * fast.micro_batch(training()).total)
    per_step = model.step(training()).total - once.total
    assert model.step(training(micro_batches=5)).total == pytest.approx(5 * once.total + per_step)


def test_equal_formats_take_equal_times() -> None:
    recipe = load_recipe("mxfp8", ALL_BLOCKS)
    twin = dataclasses.replace(recipe, name="twin", gemms={k: dataclasses.replace(v) for k, v in recipe.gemms.items()})
    times = [StepModel(counts(one), hardware(), TE_TODAY).step(training()).seconds for one in (recipe, twin)]
    assert times[0] == times[1]


def test_formats_of_one_rate_differ_in_their_bytes_only() -> None:
    gpu = hardware(dense_tflops=dict.fromkeys(("bf16", "mxfp8", "nvfp4"), 1000.0), memory_tb_s=1e9)
    totals = [StepModel(counts(name), gpu, FUSED).step(training()).total for name in ("bf16-gemm", "mxfp8", "nvfp4")]
    assert totals == pytest.approx([totals[0]] * 3)


_FASTER = {
    "memory_tb_s": 2.0,
    "nvlink_gb_s": 200.0,
    "dense_tflops": {"bf16": 2000.0, "mxfp8": 4000.0, "nvfp4": 8000.0},
    "kernel_us": 1e-12,
    "host_us": 1e-12,
}


@pytest.mark.parametrize("name", ["nvfp4-hybrid", "nvfp4", "mxfp8", "bf16-gemm"])
@pytest.mark.parametrize("field", _FASTER)
def test_no_rate_makes_a_step_longer_and_bandwidth_makes_it_shorter(name, field) -> None:
    batch = training(gpus=8, expert_parallel=4)
    slow = hardware(kernel_us=2.0, host_us=10.0)
    before = step_model(name, slow, TE_TODAY).step(batch).total
    after = step_model(name, dataclasses.replace(slow, **{field: _FASTER[field]}), TE_TODAY).step(batch).total
    assert after <= before
    if field in ("memory_tb_s", "nvlink_gb_s", "kernel_us"):
        assert after < before


def test_a_format_that_is_not_native_runs_at_the_rate_of_bf16() -> None:
    gpu = hardware(dense_tflops={"bf16": 1000.0})
    found = step_model("nvfp4-hybrid", gpu).step(training())
    control = step_model("bf16-gemm", gpu).step(training())
    assert found.seconds["gemm 4-bit"] == found.seconds["gemm 8-bit"] == 0
    assert found.seconds["gemm bf16"] == pytest.approx(control.seconds["gemm bf16"])
    assert found.total > control.total


def test_recompute_adds_one_forward_without_the_head() -> None:
    model = step_model()
    added = model.micro_batch(training(recompute=True)).total - model.micro_batch(training()).total
    assert added == pytest.approx(model.forward(training(), training_pass=True, head=False).total)


def test_the_loop_over_experts_is_that_of_row_scaled_nvfp4_in_te() -> None:
    def loop(name, stack, **changes):
        return step_model(name, hardware(**changes), stack).step(training()).seconds["row scaling"]

    assert loop("nvfp4-hybrid", FUSED) == loop("nvfp4", TE_TODAY) == loop("mxfp8", TE_TODAY) == 0
    outputs = 2 * 2 * (96 + 64) * 4096  # 2 blocks, 2 experts for a token, up and down
    assert loop("nvfp4-hybrid", TE_TODAY) == pytest.approx(outputs * LOOP_BYTES / 1e12)
    launched = loop("nvfp4-hybrid", TE_TODAY, host_us=1000.0)
    assert launched == pytest.approx(2 * 2 * 8 * 5 * 1e-3, rel=0.01)  # 2 blocks, 2 GEMMs, 8 experts, 5 operations
    tensor = load_recipe(
        "nvfp4-hybrid", {**ALL_BLOCKS, "gemms": {"experts": {"fprop_input": {"tensor_scale": "tensor"}}}}
    )
    assert loop(tensor, TE_TODAY) == 0


@pytest.mark.parametrize(("codec", "bits"), [("none", 16), ("mxfp8", 8.25), ("s2f6", 8.25), ("nvfp4", 4.5)])
def test_the_wire_carries_the_bits_of_the_codec(codec, bits) -> None:
    gpu = hardware(memory_tb_s=1e9)
    found = step_model("mxfp8", gpu, codec=codec).step(training(gpus=8, expert_parallel=4)).seconds["all-to-all"]
    numbers = 4096 * 2 * 64  # tokens, experts of a token, width
    legs, blocks = 4, 2
    assert found == pytest.approx(legs * blocks * numbers * bits / 8 * 3 / 4 / 100e9, rel=1e-3)


def test_the_all_to_all_ends_with_its_group_its_overlap_and_its_link() -> None:
    model = step_model()

    def seconds(**changes):
        return model.step(training(gpus=16, **changes)).seconds["all-to-all"]

    assert seconds(expert_parallel=1) == 0
    assert seconds(expert_parallel=4, overlap=1.0) == 0
    assert seconds(expert_parallel=4, overlap=0.5) == pytest.approx(seconds(expert_parallel=4) / 2)
    # NVLink joins 8 of 16 GPUs: half of the rows leave over a link of a tenth, instead of 7 of 8 over NVLink.
    assert seconds(expert_parallel=16) == pytest.approx(seconds(expert_parallel=8) * 10 * (8 / 16) / (7 / 8))


def test_parameters_are_gathered_by_every_micro_batch_only_where_they_are_sharded() -> None:
    gpu = hardware(dense_tflops={"bf16": 1e9}, memory_tb_s=1e9)  # nothing to hide behind
    model = step_model("bf16-gemm", gpu)

    def seconds(**changes):
        return model.step(training(micro_batches=4, **changes)).seconds["parallel"]

    parameters = model.architecture.parameters
    assert seconds(gpus=1) == 0
    assert seconds(gpus=8) == pytest.approx(4 * 3 * 2 * parameters / 100e9, rel=1e-3)
    assert seconds(gpus=8, sharded=False) == pytest.approx(2 * 2 * parameters / 100e9, rel=1e-3)
    assert seconds(gpus=16) == pytest.approx(seconds(gpus=8) * 100 / 80, rel=1e-3)  # 8 adapters of 10 GB/s


def test_padding_completes_each_experts_rows_for_quantized_gemms_alone() -> None:
    few = training(tokens=64)  # 16 rows for an expert
    seconds = {name: StepModel(counts(name), _FAST, FUSED).step(few) for name in ("mxfp8", "bf16-gemm")}
    experts = 2 * 3 * 48 * 64
    assert seconds["mxfp8"].seconds["gemm 8-bit"] == pytest.approx(
        3 * 2 * (experts * 8 * 128 + 2 * (2 * 64 * 64 + 2 * 64 * 32) * 64) / 2000e12
    )
    macs = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 8 * 64 + 2 * 3 * 48 * 64) + 128 * 64
    assert _gemm_seconds(seconds["bf16-gemm"]) == pytest.approx(3 * 2 * macs * 64 / 1000e12)


def test_passes_of_each_stack_by_hand() -> None:
    row, mx = QuantSpec("nvfp4", tensor_scale="row"), QuantSpec("mxfp8")
    stochastic = QuantSpec("mxfp8", rounding="stochastic")
    nv, eight = 4.5 / 8, 8.25 / 8

    def moved(rows, columns, stack, dequantized=False):
        return [one.bytes for one in quantize_passes(rows, columns, hardware(), stack, dequantized)]

    assert moved(mx, mx, TE_TODAY) == moved(mx, mx, FUSED) == [2 + 2 * eight]
    assert moved(row, mx, FUSED, True) == [2 + nv + eight]
    assert moved(row, mx, TE_TODAY, True) == [2, 2 + nv, nv + 2, 2 + eight]
    assert moved(row, mx, TE_BUILT_IN, True) == [2, 2 + nv + eight]
    assert moved(None, None, TE_TODAY) == []
    assert moved(row, None, TE_TODAY) == [2, 2 + nv]
    assert [one.stochastic for one in quantize_passes(stochastic, mx, hardware(), FUSED)] == [True]


def test_a_pipeline_waits_for_its_ends() -> None:
    model = step_model()
    one = model.step(training(gpus=4, micro_batches=8, sharded=False))
    four = model.step(training(gpus=4, micro_batches=8, sharded=False, pipeline_parallel=4))
    layers = (one.total - one.seconds["optimizer"]) / 4
    assert four.seconds["parallel"] == pytest.approx(layers * 3 / 8, rel=0.02)


def test_quantize_passes_by_hand_and_stochastic_ones_at_their_own_rate() -> None:
    gpu = hardware(quantize_stochastic=0.25)
    stochastic = {name: {"rounding": "stochastic"} for name in ("dgrad_grad_output", "wgrad_grad_output")}
    recipe = load_recipe("mxfp8", {**ALL_BLOCKS, "gemms": {role: stochastic for role in ("experts", "linear")}})
    nearest, slow = (step_model(one, gpu).micro_batch(training()).seconds["quantize"] for one in ("mxfp8", recipe))
    moved = (2 + 2 * 8.25 / 8) * 4096 / 1e12
    gradients = 2 * (64 + 2 * 32 + 64 + 2 * (96 + 64))  # outputs of Q, K, V, O and of the two experts of a token
    inputs = 2 * (64 + 64 + 2 * (64 + 48))  # Q, K and V read one tensor
    assert nearest == pytest.approx((inputs + gradients) * moved)
    assert slow == pytest.approx((inputs + 4 * gradients) * moved)

"""`NumericsMonitor` and the observer behind it."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from ranks import run_ranks
from tiny_models import UserModule, loader, quiet_trainer, same_state, tiny_model

from lightning_nvfp4 import NumericsMonitor, convert, quantize
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.curves import Curve
from lightning_nvfp4.evaluation.numerics_plots import numerics_plot
from lightning_nvfp4.formats.element import ELEMENTS
from lightning_nvfp4.nn.function import COMPILES
from lightning_nvfp4.nn.observer import Observer, operand_sums
from lightning_nvfp4.recipe import OPERANDS, QuantSpec

EVERYTHING = {"keep_first_blocks": 0, "keep_last_blocks": 0}


class Recorder(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    name = version = "recorder"

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


def fit(steps=1, precision="nvfp4-hybrid", every=1, model=None, **arguments):
    """Return the module and the monitor's rows; every=0 is without it."""
    module, logger = UserModule(model or tiny_model()), Recorder()
    callbacks = [NumericsMonitor(every_n_steps=every)] if every else []
    quiet_trainer(steps, precision=precision, callbacks=callbacks, logger=logger, **arguments).fit(module, loader())
    return module, [(step, row) for step, row in logger.rows if any(name.startswith("numerics/") for name in row)]


def data(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(x, q):
    """The definitions, from what the quantized tensor says of its scales."""
    before, after = x.double(), q.dequantize(torch.float64)
    block = q.spec.block[1]
    # In float32, as it is decoded: else the last bit of a product decides whether the largest element is cut.
    limit = ELEMENTS[q.spec.element].max * q.block_scale.view(torch.float8_e4m3fn).float().repeat_interleave(block, -1)
    limit = (limit * q.tensor_scale).movedim(-1, q.dim)
    return [
        before.square().sum(),
        (before - after).square().sum(),
        (before.abs() > limit).sum(),
        ((before != 0) & (after == 0)).sum(),
        (before != 0).sum(),
        before.abs().max(),
    ]


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("tensor_scale", ["tensor", "row"])
def test_sums_are_their_definitions(dim, tensor_scale):
    x = data(64, 96, seed=1) * torch.logspace(-2, 2, 96)
    x[::5] = 0
    q = quantize(x, QuantSpec("nvfp4", tensor_scale=tensor_scale), dim=dim)
    sums, expected = operand_sums(x, q), by_hand(x, q)
    assert expected[2] > 0 and expected[3] > 0
    assert sums[2:].tolist() == [float(value) for value in expected[2:]]
    assert sums[:2].tolist() == pytest.approx([float(value) for value in expected[:2]], rel=1e-5)


@pytest.mark.parametrize("spec", [QuantSpec("s2f6"), QuantSpec("nvfp4", hadamard=16), QuantSpec("mxfp8", hadamard=32)])
def test_the_transform_is_undone_before_the_noise_is_taken(spec):
    x = data(32, 40, seed=2)
    q = quantize(x, spec)
    sums = operand_sums(x, q)
    assert sums[1].item() == pytest.approx((x - q.dequantize()).double().square().sum().item(), rel=1e-6)
    assert sums[5] == x.abs().max()


def test_clipping_of_the_floor_rule_is_seen():
    x = torch.full((1, 32), 0.5)
    x[0, 0] = 1.9  # 2^0 * 448 / 256 is the largest value of the block
    sums = operand_sums(x, quantize(x, QuantSpec("mxfp8", scale_rule="floor")))
    assert sums[2] == 1
    assert operand_sums(x, quantize(x, QuantSpec("mxfp8")))[2] == 0


def test_every_operand_of_a_layer_goes_through_its_own_quantizer():
    net = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False))
    report = convert(net, "nvfp4-hybrid", overrides=EVERYTHING)
    context, gemm = report.context, report.converted[0].gemm
    context.begin(7, 0, 3, 0)
    context.observer = observer = Observer()
    x, dy = data(64, 32, seed=3).bfloat16(), data(64, 64, seed=4).bfloat16()
    net(x).backward(dy)
    w, seed = net[0].weight.detach(), net[0].block_scaled_numerics.seed
    seen_x, seen_w = quantize(x, gemm.fprop_input), quantize(w, gemm.fprop_weight)
    expected = {
        "fprop_input": (x, seen_x),
        "fprop_weight": (w, seen_w),
        "dgrad_grad_output": (dy, quantize(dy, gemm.dgrad_grad_output, seed=seed("dgrad_grad_output"))),
        "dgrad_weight": (w, quantize(seen_w.dequantize(), gemm.dgrad_weight, dim=0)),
        "wgrad_grad_output": (dy, quantize(dy, gemm.wgrad_grad_output, dim=0, seed=seed("wgrad_grad_output"))),
        "wgrad_input": (x, quantize(seen_x.dequantize(torch.bfloat16), gemm.wgrad_input, dim=0)),
    }
    assert {operand for _, operand in observer.sums} == set(OPERANDS)
    for operand, (given, q) in expected.items():
        signal, noise = given.double().square().sum(), (given.double() - q.dequantize(torch.float64)).square().sum()
        sums = observer.sums[0, operand]
        assert sums[:2].tolist() == pytest.approx([signal.item(), noise.item()], rel=1e-5), operand


@pytest.mark.parametrize("precision", ["nvfp4-hybrid", "nvfp4"])
def test_training_is_the_same_bit_for_bit(precision):
    watched, rows = fit(3, precision, accumulate_grad_batches=2)
    alone, none = fit(3, precision, every=0, accumulate_grad_batches=2)
    assert rows and not none
    assert watched.losses == alone.losses and same_state(watched, alone)


def test_steps_that_the_number_divides_are_logged_once():
    assert [step for step, _ in fit(5, every=2)[1]] == [0, 2, 4]
    assert [step for step, _ in fit(4, every=3, accumulate_grad_batches=2)[1]] == [0, 3]


def test_the_first_micro_batch_counts():
    (_, whole), (_, parts) = fit(1)[1][0], fit(1, accumulate_grad_batches=4)[1][0]
    for name, value in whole.items():
        # The loss of a micro-batch is a quarter of the whole one's: a power of two moves the magnitudes alone.
        assert parts[name] == (value / 4 if "grad_output/amax" in name else value), name


@pytest.mark.filterwarnings("ignore:.*checkpointing_enable.*")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_not_counted_again(reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    _, recomputed = fit(2, model=model)
    plain = tiny_model()
    plain.train()
    assert recomputed == fit(2, model=plain)[1]


def test_names_values_and_formats():
    (_, row), *_ = fit(1)[1]
    assert all(math.isfinite(value) for value in row.values())
    paths = {name.split("/")[1] for name in row}
    experts = "model.model.layers.0.mlp.experts"
    assert {f"{experts}.gate_up_proj", f"{experts}.down_proj", "model.model.layers.0.self_attn.q_proj"} <= paths
    assert not any("lm_head" in path or "layers.1." in path for path in paths), "the last block is kept"
    assert len(row) == len(paths) * len(OPERANDS) * 4
    four, eight = (row[f"numerics/{experts}.down_proj/{o}/sqnr"] for o in ("fprop_weight", "dgrad_grad_output"))
    assert 15 < four < 25 < eight < 35, "E2M1 and E4M3"


def test_operands_of_zeros_have_no_sqnr():
    """A number that no logger and no picture can take."""
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    (_, row), *_ = fit(1, model=model)[1]
    name = "numerics/model.model.layers.0.mlp.experts.down_proj/fprop_weight"
    assert row[f"{name}/amax"] == 0 and f"{name}/sqnr" not in row
    assert all(math.isfinite(value) for value in row.values())


def test_the_control_arm_has_nothing_to_show():
    assert fit(1, "bf16-gemm")[1] == [(0, {})] or not fit(1, "bf16-gemm")[1]


@pytest.mark.skipif(not COMPILES, reason="before torch 2.13 these layers run outside of compiled graphs")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_compiled_model_is_observed():
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(128, 32))

    class Dense(UserModule):
        def training_step(self, batch, batch_idx):
            loss = self.model(torch.nn.functional.one_hot(batch.flatten(), 128).float()).square().mean()
            self.losses.append(loss.item())
            return loss

    def rows(compiled):
        torch.manual_seed(0)
        net[0].reset_parameters()
        module, logger = Dense(net), Recorder()
        if compiled:
            net.compile(backend="aot_eager")
        quiet_trainer(3, precision="mxfp8", callbacks=[NumericsMonitor(2)], logger=logger).fit(module, loader())
        return logger.rows, module.losses

    plain, compiled = rows(False), rows(True)
    assert plain == compiled and [step for step, _ in plain[0]] == [0, 2]
    torch._dynamo.reset()


class Ranked(UserModule):
    """Each rank has tokens of its own."""

    def __init__(self, model, number=None):
        super().__init__(model)
        self.number = number

    def training_step(self, batch, batch_idx):
        number = self.trainer.global_rank if self.number is None else self.number
        return super().training_step((batch + number) % 128, batch_idx)


def row_of(module, **arguments):
    logger = Recorder()
    trainer = quiet_trainer(1, precision="mxfp8", callbacks=[NumericsMonitor()], logger=logger, **arguments)
    trainer.fit(module, loader())
    return logger.rows


def on_rank(rank):
    return row_of(Ranked(tiny_model()), strategy="ddp", devices=2, use_distributed_sampler=False)


def test_two_ranks_are_added_and_the_first_logs():
    alone = [row_of(Ranked(tiny_model(), number))[0][1] for number in (0, 1)]
    first, second = run_ranks(on_rank, 2, group=None)
    (step, both), *_ = first
    assert step == 0 and not second and both.keys() == alone[0].keys()
    inputs = [name for name in both if "fprop_input" in name]
    for name in inputs:
        low, high = sorted(row[name] for row in alone)
        if name.endswith("amax"):
            assert both[name] == high
        else:
            assert low - 1e-9 <= both[name] <= high + 1e-9
    assert any(both[name] not in (alone[0][name], alone[1][name]) for name in inputs)


def test_layers_are_chosen_by_pattern():
    logger = Recorder()
    monitor = NumericsMonitor(1, paths=["*.experts.down_proj"])
    quiet_trainer(1, precision="mxfp8", callbacks=[monitor], logger=logger).fit(UserModule(tiny_model()), loader())
    assert {name.split("/")[1] for name in logger.rows[0][1]} == {"model.model.layers.0.mlp.experts.down_proj"}


@pytest.mark.parametrize("number", [0, -1, 2.5, True])
def test_refuses_numbers_that_are_no_interval(number):
    with pytest.raises(UserError, match="every_n_steps"):
        NumericsMonitor(number)


def test_refuses_patterns_without_a_layer_and_stock_precision():
    with pytest.raises(UserError, match="match none"):
        quiet_trainer(1, precision="mxfp8", callbacks=[NumericsMonitor(paths=["nothing"])]).fit(
            UserModule(tiny_model()), loader()
        )
    with pytest.raises(UserError, match="bf16-mixed"):
        quiet_trainer(1, precision="bf16-mixed", callbacks=[NumericsMonitor()]).fit(UserModule(tiny_model()), loader())


def test_the_picture_has_a_row_for_every_operand_and_a_column_for_every_block():
    names = [f"numerics/model.layers.{b}.mlp.down_proj/{o}/{w}" for b in (0, 3) for o in OPERANDS for w in ("sqnr",)]
    names += [name.replace("sqnr", what) for name in names for what in ("flushed", "saturated", "amax")]
    svg = numerics_plot({name: Curve(np.array([0, 100]), np.array([9.0, 0.25])) for name in names})
    assert svg is not None and all(f"mlp.down_proj {operand}" in svg for operand in OPERANDS)
    assert numerics_plot({"train/loss": Curve(np.array([0]), np.array([1.0]))}) is None

"""`fp8` through Transformer Engine on Hopper, against the emulation."""

from __future__ import annotations

import copy

import pytest
import torch
from one_layer import CASES, run
from tiny_models import UserModule, loader, quiet_trainer, tiny_model

from lightning_nvfp4 import PRESETS, convert
from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.ops.te import known_answer
from lightning_nvfp4.testing import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("te")]
FP8 = PRESETS["fp8"].gemms["experts"]


def test_the_quantizers_bytes_are_the_references():
    assert known_answer.differences(FP8, "cuda") == []


def test_a_planted_fault_in_the_reference_is_seen(monkeypatch):
    """The comparison can fail: with E5M2 elements every plane differs."""
    planned = known_answer.planned(PRESETS["fp8"].gemms["experts"])
    for plan in planned.values():
        monkeypatch.setitem(plan.fields, "fp8_dtype", "kFloat8E5M2")
    monkeypatch.setattr(known_answer, "planned", lambda gemm: planned)
    assert len(known_answer.differences(FP8, "cuda")) >= 3


@pytest.mark.parametrize(("counts", "n", "k", "bias"), CASES, ids=str)
def test_a_layer_equals_the_emulation(counts, n, k, bias):
    """Operands have the same bytes; what is left is BF16 results and the tensor cores' sums."""
    for ours, theirs in zip(run(FP8, "triton", counts, n, k, bias), run(FP8, "te", counts, n, k, bias), strict=True):
        assert sqnr_db(ours.float(), theirs.float()) > 45


@pytest.mark.parametrize("counts", [(256,), (128, 0, 256)], ids=str)
def test_weight_gradients_are_fp32(counts):
    """More than BF16 can hold, and zeros for an expert without tokens."""
    dw = run(FP8, "te", counts, 128, 128, False)[2]
    assert dw.dtype == torch.float32
    assert (dw != dw.bfloat16().float()).float().mean() > 0.5
    for expert, count in enumerate(counts):
        assert (count == 0) == bool((dw[expert] == 0).all())


def model(name="qwen3_moe"):
    return tiny_model(name, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_trainer_takes_it_by_itself(name):
    module = UserModule(model(name))
    keys = set(module.state_dict())
    trainer = quiet_trainer(4, precision="fp8", accelerator="cuda")
    plugin = trainer.precision_plugin
    seen = []
    convert_module = plugin.convert_module
    plugin.convert_module = lambda m: (convert_module(m), seen.append(plugin.report))[0]
    trainer.fit(module, loader())
    assert seen[0].backend == "te" and seen[0].native and not seen[0].emulated
    assert "Transformer Engine" in seen[0].summary()
    assert set(module.state_dict()) == keys, "nothing of Transformer Engine is in the state dict"
    assert all(torch.tensor(module.losses).isfinite())
    gradients = {n: p.grad for n, p in module.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    experts = [g for n, g in gradients.items() if "experts" in n]
    assert all(g.ndim == 3 and bool((g != 0).any()) for g in experts)
    assert (name == "llama") == (not experts)


def test_recompute_repeats_the_bits():
    def losses(kind):
        torch.manual_seed(0)
        net = model().cuda()
        convert(net, "fp8", backend="te")
        if kind is not None:
            net.gradient_checkpointing_enable({"use_reentrant": kind})
            net.train()
        ids = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            net(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    plain = losses(None)
    for kind in (False, True):
        assert all(torch.equal(a, b) for a, b in zip(plain, losses(kind), strict=True))


def test_gradients_add_up_over_micro_batches():
    numerics = LayerNumerics(FP8, NumericsContext(), 0, native=True)
    w = torch.randn(1, 128, 128, device="cuda", requires_grad=True)
    x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    grouped_linear(x, w, None, (128,), numerics, torch.bfloat16).sum().backward()
    once = w.grad.clone()
    grouped_linear(x, w, None, (128,), numerics, torch.bfloat16).sum().backward()
    assert torch.equal(w.grad, once + once)


def test_two_calls_of_a_layer_before_its_backward():
    numerics = LayerNumerics(FP8, NumericsContext(), 0, native=True)
    w = torch.randn(1, 128, 128, device="cuda", requires_grad=True)
    xs = [torch.randn(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    expected = []
    for x in xs:
        (g,) = torch.autograd.grad(grouped_linear(x, w, None, (128,), numerics, torch.bfloat16).sum(), w)
        expected.append(g)
    sum(grouped_linear(x, w, None, (128,), numerics, torch.bfloat16).sum() for x in xs).backward()
    assert torch.equal(w.grad, expected[0] + expected[1])


def test_a_frozen_weight_and_an_input_without_gradient():
    numerics = LayerNumerics(FP8, NumericsContext(), 0, native=True)
    for frozen in (True, False):
        w = torch.randn(1, 128, 128, device="cuda", requires_grad=not frozen)
        x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=frozen)
        grouped_linear(x, w, None, (128,), numerics, torch.bfloat16).sum().backward()
        assert (w.grad is None) == frozen and (x.grad is None) != frozen


def test_the_forward_in_bf16_of_a_precision_schedule():
    context = NumericsContext(forward_high_precision=True)
    numerics = LayerNumerics(FP8, context, 0, native=True)
    x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(1, 128, 128, device="cuda", requires_grad=True)
    y = grouped_linear(x, w, None, (128,), numerics, torch.bfloat16)
    y.backward(torch.randn_like(y))
    assert sqnr_db(x.detach().float() @ w.detach()[0].bfloat16().float().T, y.float()) > 45
    assert w.grad.isfinite().all() and x.grad.isfinite().all()


def test_without_gradients():
    numerics = LayerNumerics(FP8, NumericsContext(), 0, native=True)
    x, w = torch.randn(3, 128, device="cuda"), torch.randn(1, 128, 128, device="cuda")
    with torch.no_grad():
        y = grouped_linear(x, w, None, (3,), numerics, torch.bfloat16)
    emulated = LayerNumerics(FP8, NumericsContext(), 0, "triton")
    assert sqnr_db(grouped_linear(x, w, None, (3,), emulated, torch.bfloat16).float(), y.float()) > 45


def test_a_converted_model_can_be_copied():
    net = model().cuda()
    convert(net, "fp8", backend="te")
    ids = torch.zeros(1, 16, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), torch.no_grad():
        assert torch.equal(net(ids).logits, copy.deepcopy(net)(ids).logits)


def test_a_checkpoint_goes_on_in_nvfp4_hybrid_on_a_cpu_and_back(tmp_path):
    module = UserModule(model())
    trainer = quiet_trainer(2, precision="fp8", accelerator="cuda")
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "gpu.ckpt")
    on_cpu = UserModule(model())
    trainer = quiet_trainer(4, precision="nvfp4-hybrid")
    trainer.fit(on_cpu, loader(), ckpt_path=str(tmp_path / "gpu.ckpt"))
    assert len(on_cpu.losses) == 2
    trainer.save_checkpoint(tmp_path / "cpu.ckpt")
    back = UserModule(model())
    quiet_trainer(6, precision="fp8", accelerator="cuda").fit(back, loader(), ckpt_path=str(tmp_path / "cpu.ckpt"))
    assert len(back.losses) == 2 and all(torch.tensor(back.losses).isfinite())


def test_layers_of_other_sizes_are_emulated_and_named():
    report = convert(tiny_model("llama", hidden_size=72, head_dim=18).cuda(), "fp8")
    assert report.backend == "te" and report.emulated and not report.native
    assert "multiples of 16" in report.summary()

"""Conversion in place: what changes, what must not, and the way back."""

import copy
import io
import json

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_nvfp4 import PRESETS, cached_weights, capability, convert, inference, restore
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.nn.convert import context_of
from lightning_nvfp4.nn.linear import BlockScaledLinear


def test_parameters_keys_tying_and_hooks_survive():
    model = tiny_model("llama")
    parameters = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
    keys = list(model.state_dict())
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: calls.append(1))
    convert(model, "nvfp4-hybrid")
    assert isinstance(model.model.layers[0].mlp.up_proj, BlockScaledLinear)
    assert {name: p for name, p in model.named_parameters(remove_duplicate=False)}.items() == parameters.items()
    assert list(model.state_dict()) == keys
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(tokens())
    assert calls == [1]


def test_converting_twice_equals_converting_once():
    once, twice = tiny_model(), tiny_model()
    convert(once, "nvfp4-hybrid")
    convert(twice, "mxfp8")
    convert(twice, "nvfp4-hybrid")
    convert(twice, "nvfp4-hybrid")
    assert [type(m) for m in once.modules()] == [type(m) for m in twice.modules()]
    assert torch.equal(once(tokens()).logits, twice(tokens()).logits)


@pytest.mark.parametrize("preset", PRESETS)
def test_restore_leaves_no_trace(preset):
    model = tiny_model(experts="grouped_mm")
    types, attributes = [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()]
    before = model(tokens()).logits
    convert(model, preset)
    assert not torch.equal(model(tokens()).logits, before)
    restore(model)
    assert [type(m) for m in model.modules()] == types
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert model.config._experts_implementation == "grouped_mm"
    assert torch.equal(model(tokens()).logits, before)


def test_a_saved_config_knows_nothing_of_us(tmp_path):
    model = tiny_model()
    convert(model, "nvfp4-hybrid")
    model.save_pretrained(tmp_path)
    assert "block_scaled" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_a_deep_copy_of_a_converted_model_has_its_own_state():
    model = tiny_model()
    convert(model, "nvfp4-hybrid")
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens()).logits, model(tokens()).logits)
    assert context_of(twin) is not context_of(model)


def test_a_subclass_of_linear_keeps_its_own_class_as_a_base():
    class Wrapped(nn.Linear):
        """As FSDP2 makes: another class, the same forward."""

    model = nn.Sequential(Wrapped(8, 8))
    convert(model, "mxfp8")
    assert isinstance(model[0], Wrapped) and isinstance(model[0], BlockScaledLinear)
    restore(model)
    assert type(model[0]) is Wrapped


def test_a_linear_with_its_own_forward_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8))
    report = convert(model, "mxfp8")
    assert [d.gemm is None for d in report.decisions] == [True, False]
    assert "Doubled" in report.decisions[0].reason


def test_nothing_to_convert_is_an_error_unless_asked_for():
    with pytest.raises(UserError, match="converted no layer"):
        convert(nn.Sequential(nn.ReLU()), "mxfp8")
    with pytest.raises(UserError, match="last 2 of 2 blocks"):
        convert(tiny_model(), "mxfp8", overrides={"keep_last_blocks": 2})
    model = tiny_model()
    report = convert(model, "mxfp8", overrides={"roles": {}})
    assert not report.converted
    assert not any(isinstance(m, BlockScaledLinear) for m in model.modules())


def test_a_failed_conversion_leaves_the_model_as_it_was():
    model = tiny_model()
    with pytest.raises(UserError):
        convert(model, "mxfp8", overrides={"keep_last_blocks": 2})
    assert not any("block_scaled_numerics" in m.__dict__ for m in model.modules())


def test_routers_compute_fp32_logits_under_autocast():
    model = tiny_model()
    convert(model, "nvfp4-hybrid")
    gate = model.model.layers[0].mlp.gate
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        logits = gate(x)[0]
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.nn.functional.linear(x, gate.weight))


def test_inference_converts_for_its_scope_only():
    model = tiny_model()
    before = model(tokens()).logits
    with inference(model, "nvfp4-hybrid") as report, torch.no_grad():
        inside = model(tokens()).logits
        assert report.context.weight_cache
    assert not torch.equal(inside, before)
    assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize("part", ["", "model.layers.0", "model.layers.0.self_attn"])
def test_inference_inside_training_leaves_the_conversion_as_it_was(part):
    model = tiny_model(experts="grouped_mm")
    before = model(tokens()).logits
    convert(model, "nvfp4-hybrid")
    converted = model(tokens()).logits
    context = context_of(model)
    with inference(model.get_submodule(part), "bf16-gemm"):
        pass
    assert torch.equal(model(tokens()).logits, converted) and context_of(model) is context
    convert(model.get_submodule(part), "bf16-gemm")
    assert not torch.equal(model(tokens()).logits, before)
    restore(model)
    assert torch.equal(model(tokens()).logits, before)
    assert model.config._experts_implementation == "grouped_mm"


def test_a_converted_model_is_pickled_whole():
    model = tiny_model()
    convert(model, "nvfp4-hybrid")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("when", ["before", "while converted"])
def test_parametrized_layers_stay_so(when):
    model = nn.Sequential(nn.Linear(32, 32))
    if when == "before":
        parametrizations.weight_norm(model[0])
    convert(model, "mxfp8")
    if when == "while converted":
        parametrizations.weight_norm(model[0])
    model(torch.randn(4, 32)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    restore(model)
    assert not isinstance(model[0], BlockScaledLinear)
    assert parametrize.is_parametrized(model[0])
    x = torch.randn(4, 32)
    assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_cached_weights_see_no_change_inside_and_every_change_after():
    model = tiny_model()
    convert(model, "nvfp4-hybrid")
    with torch.no_grad():
        with cached_weights(model):
            first = model(tokens()).logits
            assert torch.equal(model(tokens()).logits, first)
        for p in model.model.layers[0].mlp.experts.parameters():
            p.mul_(2)
        with cached_weights(model):
            assert not torch.equal(model(tokens()).logits, first)


def test_the_summary_names_preset_counts_and_backend():
    summary = convert(tiny_model(), "nvfp4-hybrid").summary()
    assert summary.startswith("nvfp4-hybrid: 5 layers converted, 8 kept") and "emulated" in summary


@pytest.mark.parametrize("backend", ["te", "triton"])
def test_a_backend_that_cannot_run_is_refused_with_the_reason(backend, monkeypatch):
    monkeypatch.setattr(capability, "has_triton", lambda: False)
    with pytest.raises(UserError, match="cannot run.*auto"):
        convert(tiny_model(), "mxfp8", backend=backend)


def test_conversion_works_on_the_meta_device():
    with torch.device("meta"):
        model = tiny_model()
    report = convert(model, "nvfp4-hybrid")
    assert len(report.converted) == 5
    assert all(p.is_meta for p in model.parameters())

"""The same numerics on CUDA: run with ``pytest -m gpu`` on a machine that has a GPU."""

import pytest
import torch
from tiny_models import ARCHITECTURES, UserModule, loader, quiet_trainer, tiny_model, tokens

from lightning_nvfp4 import PRESETS, convert
from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.function import grouped_linear
from lightning_nvfp4.testing import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def gradients(preset, device, rows, n, k):
    gemm = PRESETS[preset].gemms["experts"]
    counts = (rows, 0, 2 * rows) if rows % gemm.tokens_alignment == 0 else (rows,)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), k, generator=g).to(device).requires_grad_()
    w = torch.randn(len(counts), n, k, generator=g).to(device).requires_grad_()
    dy = torch.randn(sum(counts), n, generator=g).to(device)
    y = grouped_linear(x, w, None, counts, LayerNumerics(gemm, NumericsContext(step_seed=3), 1), torch.float32)
    y.backward(dy)
    return [t.detach().cpu() for t in (y, x.grad, w.grad)]


@pytest.mark.parametrize(("rows", "n", "k"), [(128, 96, 160), (128, 64, 64), (1, 1, 1), (7, 5, 3)])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_three_gemms_equal_the_cpus(preset, rows, n, k):
    """The operands' bits are equal, stochastic rounding included; sums differ in their order."""
    for cpu, cuda in zip(gradients(preset, "cpu", rows, n, k), gradients(preset, "cuda", rows, n, k), strict=True):
        assert sqnr_db(cpu, cuda) > 110


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_trains(name, preset):
    module = UserModule(tiny_model(name))
    quiet_trainer(2, precision=preset, accelerator="cuda").fit(module, loader())
    assert all(torch.tensor(module.losses).isfinite())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    cpu = UserModule(tiny_model(name))
    quiet_trainer(2, precision=preset).fit(cpu, loader())
    assert module.losses == pytest.approx(cpu.losses, rel=5e-3)


def test_generation_keeps_the_converted_experts():
    """Stock generation on CUDA would swap grouped GEMMs for batched ones."""
    model = tiny_model(experts="grouped_mm").cuda().eval()
    convert(model, "nvfp4-hybrid", overrides={"keep_last_blocks": 0})
    with torch.autocast("cuda", torch.bfloat16):
        out = model.generate(tokens(2, 3).cuda(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 6) and model.config._experts_implementation == "block_scaled"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_experts_never_wait_for_the_device(preset):
    """Forward and backward are launched ahead: Python and the GPU work at the same time."""
    model = tiny_model("qwen3_moe").cuda()
    convert(model, preset, overrides={"keep_first_blocks": 0, "keep_last_blocks": 0})
    block = model.model.layers[0].mlp
    x = torch.randn(2, 64, model.config.hidden_size, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            y = block(x)
        (y[0] if isinstance(y, tuple) else y).float().square().mean().backward()

    step()  # constants go to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

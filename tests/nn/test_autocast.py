"""Attention under the presets' autocast: BF16 operands everywhere, FP32 arithmetic where a CPU has no BF16."""

import pytest
import torch
from torch.nn import functional

from lightning_nvfp4.nn import autocast

STOCK = functional.scaled_dot_product_attention


def attention(*args, **kwargs):
    """Look the function up when called, as transformers does."""
    return functional.scaled_dot_product_attention(*args, **kwargs)


def operands():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 8, 16, generator=g, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("slow", [True, False])
def test_attention_rounds_its_operands_to_bf16_and_returns_bf16(monkeypatch, slow):
    monkeypatch.setattr(autocast, "slow_bf16", lambda device: slow)
    q, k, v = operands()
    with autocast.bf16_autocast("cpu"):
        out = attention(q, k, v, is_causal=True)
        product = q @ k.transpose(-1, -2)
    assert functional.scaled_dot_product_attention is STOCK
    assert out.dtype == product.dtype == torch.bfloat16
    exact = attention(*(x.bfloat16().double() for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    if slow:
        expected = attention(*(x.bfloat16().float() for x in (q, k, v)), is_causal=True).bfloat16()
        assert torch.equal(out, expected)


def test_outside_of_autocast_attention_is_untouched(monkeypatch):
    monkeypatch.setattr(autocast, "slow_bf16", lambda device: True)
    q, k, v = operands()
    with autocast.bf16_autocast("cpu"), torch.autocast("cpu", enabled=False):
        assert torch.equal(attention(q, k, v), attention(q.detach(), k.detach(), v.detach()))
        assert attention(q, k, v).dtype == torch.float32


def test_recompute_in_backward_takes_the_same_attention(monkeypatch):
    monkeypatch.setattr(autocast, "slow_bf16", lambda device: True)
    gradients = []
    for recompute in (False, True):
        leaves = operands()
        with autocast.bf16_autocast("cpu"):
            if recompute:
                y = torch.utils.checkpoint.checkpoint(attention, *leaves, use_reentrant=False)
            else:
                y = attention(*leaves)
        with autocast.attention_of_autocast("cpu"):
            y.sum().backward()
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

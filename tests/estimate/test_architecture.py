"""What is counted in a model, against counts by hand."""

from __future__ import annotations

import pytest
from tiny_models import ARCHITECTURES, tiny_model

from lightning_nvfp4 import load_recipe
from lightning_nvfp4.estimate.architecture import read_architecture
from lightning_nvfp4.selection import select

# Width 64, 2 blocks, 4 heads and 2 key-value heads of 16, 8 experts of 48, 2 for a token, 128 logits.
_ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
_ROUTER = 8 * 64
_EXPERTS = 2 * (2 * 48 * 64 + 64 * 48)
_HEAD = 128 * 64


def _read(name: str, precision: str = "mxfp8"):
    model = tiny_model(name)
    decisions = select(model, load_recipe(precision))
    return model, decisions, read_architecture(model, decisions)


def test_multiply_adds_of_a_tiny_mixture_by_hand() -> None:
    _, _, found = _read("qwen3_moe")
    assert sum(gemm.macs for gemm in found.gemms) == 2 * (_ATTENTION + _ROUTER + _EXPERTS) + _HEAD
    assert sum(gemm.macs for gemm in found.gemms if gemm.routed) == 2 * _EXPERTS
    assert sum(gemm.macs for gemm in found.gemms if gemm.head) == _HEAD
    assert found.expert_parameters == 2 * 8 * 3 * 64 * 48
    assert (found.hidden, found.vocabulary) == (64, 128)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_counts_what_the_plan_counts(name: str) -> None:
    model, decisions, found = _read(name)
    assert sum(gemm.macs for gemm in found.gemms) == pytest.approx(sum(decision.flops for decision in decisions))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    mixing = len(found.attention) + len(found.state_space)
    assert mixing == sum(hasattr(m, "o_proj") or type(m).__name__.endswith("Mamba2Mixer") for m in model.modules())
    assert found.norms


def test_cache_of_grouped_and_of_latent_attention() -> None:
    assert _read("qwen3_moe")[2].attention[0].kv_numbers == 2 * 2 * 16
    latent = _read("deepseek_v3")[2].attention[0]
    assert (latent.kv_numbers, latent.qk_dim, latent.v_dim) == (16 + 8, 8 + 8, 16)
    assert _read("gpt_oss")[2].attention[0].window in (None, 8)


def test_linears_that_read_one_tensor_are_known() -> None:
    gemms = {gemm.path: gemm.input_id for gemm in _read("llama")[2].gemms}
    layer = "model.layers.0"
    assert len({gemms[f"{layer}.self_attn.{name}_proj"] for name in "qkv"}) == 1
    assert gemms[f"{layer}.mlp.gate_proj"] == gemms[f"{layer}.mlp.up_proj"]
    assert len(set(gemms.values())) == len(gemms) - 2 * (2 + 1)

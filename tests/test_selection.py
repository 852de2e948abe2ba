"""Which layers are chosen, and the reasons given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.recipe import PRESETS, load_recipe
from lightning_nvfp4.selection import flop_shares, kept_blocks, select


def by_path(model, recipe):
    return {d.path: d for d in select(model, recipe)}


def test_qwen3_moe_under_the_hybrid():
    decisions = by_path(tiny_model(num_hidden_layers=4), PRESETS["nvfp4-hybrid"])
    experts = decisions["model.layers.0.mlp.experts"]
    assert (experts.kind, experts.use, experts.shape) == ("experts", "experts", (8, 96, 64))
    assert decisions["model.layers.0.self_attn.q_proj"].use == "linear"
    assert decisions["model.layers.0.mlp.gate"].reason == "router: FP32 logits"
    assert decisions["lm_head"].reason == "output head"
    assert decisions["model.layers.3.mlp.experts"].reason == "one of the last 1 of 4 blocks"


def test_a_wrapped_layer_is_treated_as_the_one_it_replaces():
    model = tiny_model("llama")
    model.lm_head = nn.ModuleDict({"base_layer": model.lm_head, "lora_A": nn.ModuleDict({"default": nn.Linear(64, 4)})})
    model.model.layers[0].mlp.gate = nn.ModuleDict({"base_layer": nn.Linear(64, 4)})
    decisions = by_path(model, PRESETS["nvfp4-hybrid"])
    assert decisions["lm_head.base_layer"].reason == "output head"
    assert decisions["model.layers.0.mlp.gate.base_layer"].reason == "router: FP32 logits"


def test_layers_of_unknown_sizes_are_refused():
    with pytest.raises(UserError, match="1 is a LazyLinear whose sizes are not known"):
        select(nn.Sequential(nn.ReLU(), nn.LazyLinear(4)), PRESETS["mxfp8"])


def test_a_dense_model_takes_the_hybrid_in_its_mlp():
    decisions = by_path(tiny_model("llama"), PRESETS["nvfp4-hybrid"])
    assert decisions["model.layers.0.mlp.down_proj"].use == "mlp"
    assert decisions["model.layers.0.self_attn.o_proj"].use == "linear"


def test_shared_experts_are_no_routed_experts():
    decisions = by_path(tiny_model("deepseek_v3"), PRESETS["nvfp4-hybrid"])
    assert decisions["model.layers.1.mlp.shared_experts.up_proj"].use == "linear"
    assert decisions["model.layers.1.mlp.experts"].use == "experts"


def test_a_plain_mlp_is_all_mlp():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert [d.use for d in select(model, PRESETS["nvfp4-hybrid"])] == ["mlp", "mlp"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_heads_embeddings_and_routers_stay_in_high_precision(name):
    model = tiny_model(name)
    decisions = by_path(model, load_recipe("nvfp4", {"keep_first_blocks": 0, "keep_last_blocks": 0}))
    assert decisions["lm_head"].gemm is None
    assert all(d.gemm is None for d in decisions.values() if d.kind == "router")
    assert not any(isinstance(model.get_submodule(path), nn.Embedding) for path in decisions)
    assert any(d.gemm is not None for d in decisions.values())


@pytest.mark.parametrize(
    ("depth", "kept"), [(62, (2, 8)), (48, (2, 6)), (24, (1, 3)), (4, (0, 1)), (2, (0, 1)), (1, (0, 0))]
)
def test_kept_blocks_are_the_papers_in_proportion(depth, kept):
    assert kept_blocks(PRESETS["nvfp4"], depth) == kept


def test_rules_come_before_roles_and_in_order():
    recipe = load_recipe(
        "mxfp8",
        {"rules": [{"match": "*.q_proj", "use": "keep"}, {"match": "*.self_attn.*", "use": "mlp"}]},
    )
    decisions = by_path(tiny_model(num_hidden_layers=4), recipe)
    assert decisions["model.layers.0.self_attn.q_proj"].use == "keep"
    assert decisions["model.layers.0.self_attn.k_proj"].use == "mlp"


def test_attention_of_torch_is_left_alone():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert [d.use for d in select(model, PRESETS["mxfp8"])] == ["keep", "mlp"]


def test_flop_shares_sum_to_one_and_count_active_experts_only():
    decisions = select(tiny_model(num_hidden_layers=4), PRESETS["nvfp4-hybrid"])
    shares = flop_shares(decisions)
    assert sum(shares.values()) == pytest.approx(1)
    experts = next(d for d in decisions if d.kind == "experts")
    assert experts.flops == 2 * (96 * 64 + 64 * 48)


def test_experts_that_are_modules_see_their_share_of_the_tokens():
    model: Any = nn.Module()
    model.config = SimpleNamespace(num_experts_per_tok=2)
    model.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 32)}) for _ in range(8))
    assert [d.flops for d in select(model, PRESETS["mxfp8"])] == [16 * 32 * 2 // 8] * 8


def test_selection_needs_no_weights():
    with torch.device("meta"):
        model = tiny_model()
    assert any(d.gemm for d in select(model, PRESETS["nvfp4-hybrid"]))

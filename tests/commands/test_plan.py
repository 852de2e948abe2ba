"""`nvfp4 plan`: the table and the shares for the published models, on the meta device."""

from __future__ import annotations

import time

import pytest

from lightning_nvfp4 import cli, load_recipe
from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.plan import find_model, find_recipe, meta_model, rows, summary
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.selection import select


def _model(name: str):
    return meta_model(*find_model([read_mapping(find_config(f"recipes/model/{name}.yaml"))], name))


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny-moe", 1.1346), ("moe-200m", 200.5), ("qwen3-30b-a3b", 30_532.1), ("nemotron-nano-12b", 12_310.0)],
)
def test_models_have_their_size(name: str, millions: float) -> None:
    model = _model(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_nemotron_keeps_the_papers_blocks() -> None:
    decisions = select(_model("nemotron-nano-12b"), load_recipe("nvfp4"))
    kept = {int(d.path.split(".")[2]) for d in decisions if d.gemm is None and d.path.startswith("model.layers.")}
    converted = {int(d.path.split(".")[2]) for d in decisions if d.gemm is not None}
    assert kept == {0, 1, *range(54, 62)}
    assert converted == set(range(2, 54))


def test_the_table_collapses_equal_layers_and_loses_none() -> None:
    decisions = select(_model("qwen3-30b-a3b"), load_recipe("nvfp4-hybrid"))
    table = rows(decisions)
    assert sum(row.count for row in table) == len(decisions) == 48 * 6 + 1
    experts = {row.path: row.count for row in table if row.path.endswith("experts")}
    assert experts == {
        "model.layers.{0..1}.mlp.experts": 2,
        "model.layers.{2..41}.mlp.experts": 40,
        "model.layers.{42..47}.mlp.experts": 6,
    }


def test_shares_count_the_experts_that_a_token_visits() -> None:
    decisions = select(_model("qwen3-30b-a3b"), load_recipe("nvfp4-hybrid"))
    experts = 8 * 3 * 2048 * 768
    attention = 2 * 4096 * 2048 + 2 * 512 * 2048
    whole = 48 * (experts + attention + 128 * 2048) + 151936 * 2048
    text = summary(decisions)
    assert f"{40 * experts / whole:.1%} in 4 bits" in text.splitlines()[1]
    assert f"{40 * experts / whole / 3:.1%} in 4 bits" in text.splitlines()[2]
    assert "0.0% in 4 bits" in summary(select(_model("tiny-moe"), load_recipe("mxfp8")))


def test_the_command_prints_it_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert cli.main(["plan", "--config", "recipes/model/qwen3-30b-a3b.yaml"]) == 0
    assert time.monotonic() - start < 30
    said = capsys.readouterr().out
    for part in ("30,532.1 M parameters", "model.layers.{2..41}.mlp.experts", "nvfp4", "router", "output head"):
        assert part in said


def test_a_full_recipe_and_its_overlays_give_the_precision() -> None:
    sections = [read_mapping(find_config(name)) for name in ("recipes/pretrain.yaml", "recipes/precision/fp8.yaml")]
    assert find_recipe(sections, None).name == "fp8"
    assert find_recipe(sections, "mxfp8").name == "mxfp8"
    assert find_recipe(sections[:1], None).name == "nvfp4-hybrid"
    with pytest.raises(UserError, match="'bf16-mixed'"):
        find_recipe([{"trainer": {"precision": "bf16-mixed"}}], None)
    plugin = {"class_path": "lightning_nvfp4.BlockScaledPrecision", "init_args": {"overrides": {"keep_last_blocks": 3}}}
    assert find_recipe([{"trainer": {"plugins": [plugin]}}], None).keep_last_blocks == 3


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ("10.0", ["Transformer Engine 2.20 on compute capability 10.0", "CustomRecipe", "StochasticMXFP8Quantizer"]),
        ("9.0", ["emulated: compute capability 9.0"]),
    ],
)
def test_the_quantizers_of_another_gpu(capability: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--config", "recipes/model/tiny-moe.yaml", "--compute-capability", capability]
    assert cli.main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(word in printed for word in words)
    assert ("Quantizer(" in printed) == ("Transformer Engine 2." in printed)


def test_a_compute_capability_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", "recipes/model/tiny-moe.yaml", "--compute-capability", "sm100"]) != 0
    assert "10.0 for a B200" in capsys.readouterr().err

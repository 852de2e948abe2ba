"""Laws of the export: a plain Hugging Face folder, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm import export as export_module
from lightning_nvfp4.lm.export import HFExport
from lightning_nvfp4.lm.hf_model import build_model
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig


@pytest.fixture
def exported(moe_fields: dict[str, Any], lm_data: Any, make_trainer: Any) -> Any:
    module = CausalLM(model=moe_fields, optimizer=OptimizerConfig(lr=1e-2))
    make_trainer(2, callbacks=[HFExport()], precision="bf16-mixed").fit(module, lm_data())
    return module


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_is_an_ordinary_fp32_model_with_tokenizer(exported, tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = exported.network.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in tensors  # the published layout, one tensor an expert
    loaded = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "w7 w8"}]
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (
        loaded.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        == "<user> w7 w8 <turn> <assistant>"
    )


def test_generation_stops_at_the_answers_end_and_pads(exported, tmp_path: Path) -> None:
    settings = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (settings.eos_token_id, settings.pad_token_id) == ([1, 2], 0)
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.eos_token_id == 1 and config.pad_token_id is None
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompts = torch.tensor([[0, 7, 8], [9, 8, 7]])
    assert model.generate(prompts, attention_mask=(prompts > 0).long(), max_new_tokens=3, do_sample=False).shape[0] == 2


def test_names_of_ours_stay_out_of_the_configuration(
    moe_fields, lm_data, make_trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = CausalLM(model=moe_fields)
    module.configure_model()
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "block_scaled_test", ALL_EXPERTS_FUNCTIONS["batched_mm"])
    module.network.set_experts_implementation("block_scaled_test")
    make_trainer(1, callbacks=[HFExport()]).fit(module, lm_data())
    text = "".join(path.read_text() for path in (tmp_path / "hf").glob("*.json"))
    assert "block_scaled_test" not in text and "experts_implementation" not in text and "nvfp4" not in text
    assert module.network.config._experts_implementation == "block_scaled_test"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]


def test_exporting_again_gives_equal_bytes_and_leaves_nothing_beside(
    exported, lm_data, make_trainer, tmp_path: Path
) -> None:
    first = contents(tmp_path / "hf")
    (tmp_path / ".hf.1.tmp").mkdir()
    (tmp_path / ".hf.1.old").mkdir()
    module = CausalLM(pretrained=str(tmp_path), optimizer=OptimizerConfig(lr=1e-30, weight_decay=0.0))
    make_trainer(1, callbacks=[HFExport()]).fit(module, lm_data())
    assert contents(tmp_path / "hf") == first
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_fit_exports_nothing_and_leaves_what_was_there(
    exported, moe_fields, lm_data, make_trainer, tmp_path
) -> None:
    class Fail(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ArithmeticError("stop")

    before = contents(tmp_path / "hf")
    with pytest.raises(ArithmeticError):
        make_trainer(2, callbacks=[HFExport(), Fail()]).fit(CausalLM(model=moe_fields), lm_data())
    assert contents(tmp_path / "hf") == before


def test_a_full_disk_leaves_the_previous_export(exported, tokenizer, tmp_path: Path, monkeypatch) -> None:
    before = contents(tmp_path / "hf")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module.os, "fsync", full)
    network = exported.network
    with pytest.raises(UserError, match=r"exported to .*hf: .*No space left on device.*unchanged"):
        export_module.export(network, export_module.gather_weights(network), tmp_path / "hf", tokenizer)
    assert contents(tmp_path / "hf") == before and not list(tmp_path.glob(".hf*"))


EXTRA_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("model_type", list(EXTRA_FIELDS))
def test_other_architectures_come_back_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
    fields |= EXTRA_FIELDS[model_type]
    model = build_model(fields, seed=2)
    export_module.export(model, export_module.gather_weights(model), tmp_path / "hf", tokenizer=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_modules_and_folders_that_cannot_be_exported_are_refused(lm_data, make_trainer) -> None:
    class Other(LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(UserError, match="the fitted module is a Other"):
        HFExport().on_fit_end(make_trainer(1), Other())
    for folder in ("", "a/b", "..", "."):
        with pytest.raises(UserError, match="name of one folder"):
            HFExport(folder)

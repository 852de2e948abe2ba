"""Laws of CausalLM: weights, losses, resuming, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.hf_model import build_model, load_model, resolve_pretrained
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig, ScheduleConfig


def equal_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_weights_are_a_function_of_fields_and_seed_and_no_random_state_moves(moe_fields) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = build_model(moe_fields, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert equal_weights(first, build_model(moe_fields, seed=1))
    assert not equal_weights(first, build_model(moe_fields, seed=2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_do_not_depend_on_the_precision_and_stay_fp32(
    moe_fields, lm_data, make_trainer, precision: str
) -> None:
    module = CausalLM(model={**moe_fields, "dtype": "bfloat16"}, seed=3)
    make_trainer(1, precision=precision).fit(module, lm_data())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    untrained = CausalLM(model=moe_fields, seed=3)
    untrained.configure_model()
    assert equal_weights(untrained.network, build_model(moe_fields, seed=3))


def test_configure_model_builds_once(moe_fields) -> None:
    module = CausalLM(model=moe_fields)
    with pytest.raises(RuntimeError, match="configure_model"):
        module.network  # noqa: B018
    module.configure_model()
    network = module.network
    module.configure_model()
    assert module.network is network and network.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_parameter(moe_fields, tied: bool) -> None:
    model = build_model({**moe_fields, "tie_word_embeddings": tied}, seed=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_the_loss_is_hugging_faces_and_cross_entropy_is_told_apart(moe_fields, lm_data) -> None:
    module = CausalLM(model=moe_fields)
    module.configure_model()
    batch = lm_data().make(0)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["labels"][:, :4] = -100
    loss, aux_loss, logits = module.losses(batch, load_balance=True)
    theirs = module.network(**batch)
    cross_entropy = torch.nn.functional.cross_entropy(logits[:, 3:-1].flatten(0, 1), batch["labels"][:, 4:].flatten())
    assert torch.equal(loss + 0.01 * aux_loss, theirs.loss) and torch.equal(aux_loss, theirs.aux_loss)
    torch.testing.assert_close(loss, cross_entropy)
    assert aux_loss > 0.5


def test_attention_mask_and_position_ids_reach_the_model(dense_fields, lm_data) -> None:
    module = CausalLM(model=dense_fields)
    module.configure_model()
    batch = lm_data().make(0)
    plain = module.losses(batch, False)[2]
    mask = torch.ones_like(batch["input_ids"])
    mask[:, :3] = 0
    masked = module.losses({**batch, "attention_mask": mask}, False)[2]
    shifted = module.losses({**batch, "position_ids": torch.arange(12).expand(4, -1) * 3}, False)[2]
    assert not torch.allclose(plain[:, 5:], masked[:, 5:]) and not torch.allclose(plain[:, 5:], shifted[:, 5:])


def test_training_lowers_the_loss_and_logs_what_it_says(moe_fields, lm_data, make_trainer) -> None:
    module = CausalLM(model=moe_fields, optimizer=OptimizerConfig(lr=1e-2), schedule=ScheduleConfig(warmup_steps=3))
    trainer = make_trainer(30, limit_val_batches=2, val_check_interval=30, check_val_every_n_epoch=None)
    trainer.fit(module, lm_data())
    metrics = trainer.callback_metrics
    assert set(metrics) == {
        "train/loss", "train/aux_loss", "train/grad_norm", "train/lr", "val/loss", "val/perplexity",
    }  # fmt: skip
    assert metrics["train/loss"] < 1.5 < math.log(64)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]), rel=1e-4)


@pytest.mark.parametrize(
    ("configured", "argument", "coef"), [(True, None, 0.01), (False, None, 0.0), (False, 0.5, 0.5), (True, 0.0, 0.0)]
)
def test_the_load_balance_loss_has_the_weight_that_was_asked_for(
    moe_fields, lm_data, make_trainer, configured: bool, argument: float | None, coef: float
) -> None:
    module = CausalLM(model={**moe_fields, "output_router_logits": configured}, aux_loss_coef=argument)
    trainer = make_trainer(1)
    trainer.fit(module, lm_data())
    assert module.load_balance_coef == coef and ("train/aux_loss" in trainer.callback_metrics) is (coef > 0)


def test_a_load_balance_loss_without_routers_is_refused(dense_fields, lm_data, make_trainer) -> None:
    make_trainer(1).fit(CausalLM(model=dense_fields, aux_loss_coef=0.0), lm_data())
    with pytest.raises(UserError, match="aux_loss_coef is 0.1: qwen3 has no load balance loss"):
        make_trainer(1).fit(CausalLM(model=dense_fields, aux_loss_coef=0.1), lm_data())


def test_perplexity_leaves_out_ignored_labels(dense_fields, tokenizer, lm_data, make_trainer) -> None:
    data = lm_data()
    original = data.make

    def mask_answers(index: int) -> dict:
        batch = original(index)
        batch["labels"][:, :9] = -100
        return batch

    data.make = mask_answers
    trainer = make_trainer(1, limit_val_batches=1)
    (result,) = trainer.validate(CausalLM(model=dense_fields), data, verbose=False)
    assert result["val/perplexity"] == pytest.approx(math.exp(result["val/loss"]), rel=1e-5)


@pytest.mark.parametrize("size", [32, 71])
def test_another_tokenizers_model_is_refused_at_fit_start(dense_fields, lm_data, make_trainer, size: int) -> None:
    with pytest.raises(UserError, match=rf"has {size} token embeddings.*has 64 tokens.*set model.vocab_size to 64"):
        make_trainer(1).fit(CausalLM(model={**dense_fields, "vocab_size": size}), lm_data())


def test_a_rounded_up_vocabulary_is_accepted(dense_fields, lm_data, make_trainer) -> None:
    make_trainer(1).fit(CausalLM(model={**dense_fields, "vocab_size": 70}), lm_data())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_mo"}, "model.model_type 'qwen3_mo' is unknown. Did you mean 'qwen3_moe'"),
        ({"model_type": None}, "model.model_type is missing"),
        ({"hiden_size": 3}, r"model field \(qwen3_moe\) 'hiden_size' is unknown. Did you mean 'hidden_size'"),
        ({"hidden_size": "wide"}, r"model \(qwen3_moe\).*hidden_size"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_is_built(moe_fields, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CausalLM(model=moe_fields | change)


def test_exactly_one_source_of_weights(moe_fields) -> None:
    for arguments in ({}, {"model": moe_fields, "pretrained": "x"}):
        with pytest.raises(UserError, match="exactly one of model"):
            CausalLM(**arguments)


def test_legacy_names_and_undeclared_fields_of_published_configs_are_known(moe_fields) -> None:
    model = build_model(moe_fields | {"rope_theta": 1000.0, "num_local_experts": 4}, seed=0)
    assert model.config.rope_parameters["rope_theta"] == 1000.0
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)


def test_a_model_without_sdpa_gets_eager_attention() -> None:
    fields = {
        "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    assert not GptOssForCausalLM._supports_sdpa and GptOssConfig.model_type == "gpt_oss"
    assert build_model(fields, seed=0).config._attn_implementation == "eager"


def test_bf16_checkpoints_become_fp32_masters(moe_fields, tmp_path: Path) -> None:
    model = build_model(moe_fields, seed=4).bfloat16()
    model.save_pretrained(tmp_path / "bf16")
    loaded = load_model(tmp_path / "bf16")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert equal_weights(loaded, model.float())


def test_a_run_folder_means_its_export_and_other_paths_say_what_is_missing(moe_fields, tmp_path: Path) -> None:
    build_model(moe_fields, seed=4).save_pretrained(tmp_path / "pretrain" / "hf")
    assert resolve_pretrained(tmp_path / "pretrain") == str(tmp_path / "pretrain" / "hf")
    assert resolve_pretrained(str(tmp_path / "pretrain" / "hf")) == str(tmp_path / "pretrain" / "hf")
    assert resolve_pretrained("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    (tmp_path / "last.ckpt").touch()
    for path, message in (
        (tmp_path / "last.ckpt", "a file.*--ckpt_path"),
        (tmp_path, "neither it nor its hf/ holds a config.json"),
        (tmp_path / "absent", "no such folder"),
        ("./absent", "no such folder"),
        ("a/b/c", "no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_pretrained(path)


def test_broken_and_quantized_exports_are_refused(moe_fields, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    model = build_model(moe_fields, seed=4)
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="transformers cannot load it"):
        load_model(folder)
    model.config.quantization_config = {"quant_method": "fp8"}
    model.config.save_pretrained(folder)
    with pytest.raises(UserError, match="quantized checkpoint.*unquantized version"):
        load_model(folder)


def test_a_checkpoint_opens_without_the_trainer(moe_fields, lm_data, make_trainer, tmp_path: Path) -> None:
    module = CausalLM(model=moe_fields, optimizer=OptimizerConfig(lr=0.5), schedule=ScheduleConfig(warmup_steps=7))
    trainer = make_trainer(1)
    trainer.fit(module, lm_data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    keys = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"].keys()
    assert keys == {f"model.{name}" for name in AutoModelForCausalLM.from_config(module.network.config).state_dict()}
    loaded = CausalLM.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert equal_weights(loaded.network, module.network)
    assert loaded.optimizer_config == OptimizerConfig(lr=0.5) and loaded.schedule_config.warmup_steps == 7


@pytest.mark.parametrize("name", ["runs/decay", "/a/b", "./x", "~/x", "a/b/c", "here/x"])
def test_names_that_can_only_be_folders_are_not_asked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match="no such folder"):
        resolve_pretrained(name)
    assert resolve_pretrained("owner/name") == "owner/name"


def test_a_checkpoint_that_leaves_nothing_to_train_is_refused(tmp_path):
    model = CausalLM(
        model={
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
        }
    )
    trainer = SimpleNamespace(training=True, max_steps=3, ckpt_path=str(tmp_path / "a" / "x.ckpt"))
    trainer.default_root_dir = str(tmp_path / "b")
    model._trainer = trainer
    model.on_load_checkpoint({"global_step": 2})
    with pytest.raises(UserError, match="step 3.*max_steps = 3"):
        model.on_load_checkpoint({"global_step": 3})
    trainer.default_root_dir = str(tmp_path / "a")  # its own: a finished run that is started again
    model.on_load_checkpoint({"global_step": 3})

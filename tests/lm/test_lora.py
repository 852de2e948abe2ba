"""Laws of low-rank adapters: they alone are trained, in high precision, and the export is the trained model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import AutoModelForCausalLM

from lightning_nvfp4.commands.fit import _mistake
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.export import HFExport
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig
from lightning_nvfp4.nn.convert import convert
from lightning_nvfp4.selection import select

peft = pytest.importorskip("peft", reason="peft is not installed")
FAST = OptimizerConfig(lr=2e-2, weight_decay=0.0)
TOKENS = torch.arange(24).view(2, 12) + 6


def adapted(fields: dict[str, Any], **options: Any) -> CausalLM:
    module = CausalLM(fields, optimizer=FAST, lora={"rank": 4, "alpha": 8.0, **options})  # type: ignore[arg-type]
    module.configure_model()
    return module


def test_adapters_begin_as_nothing_and_alone_are_trained(dense_fields, lm_data, make_trainer) -> None:
    plain = CausalLM(dense_fields)
    plain.configure_model()
    module = adapted(dense_fields)
    with torch.no_grad():
        assert torch.equal(module.network(TOKENS).logits, plain.network(TOKENS).logits)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(3, precision="nvfp4-hybrid").fit(module, lm_data())
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert changed == trained and all(".lora_" in name for name in trained) and len(trained) == 2 * 2 * 7
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_the_frozen_weights_run_in_the_preset_and_the_adapters_do_not(dense_fields) -> None:
    network = adapted(dense_fields | {"num_hidden_layers": 4}).network
    report = convert(network, "nvfp4-hybrid")
    use = {decision.path: decision for decision in report.decisions}
    assert use["model.layers.1.mlp.up_proj.base_layer"].gemm is not None
    adapters = [decision for path, decision in use.items() if ".lora_" in path]
    assert len(adapters) == 4 * 7 * 2 and {decision.reason for decision in adapters} == {"low-rank adapter"}
    assert all(decision.gemm is None for decision in adapters)
    assert {d.path for d in select(network, report.recipe) if d.reason == "output head"} == {"lm_head"}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_export_is_the_trained_model_and_peft_loads_the_adapter(
    dense_fields, lm_data, make_trainer, tmp_path: Path
) -> None:
    base = CausalLM(dense_fields)
    base.configure_model()
    base.network.save_pretrained(tmp_path / "base")
    module = CausalLM(
        pretrained=str(tmp_path / "base"), optimizer=FAST, lora={"rank": 4, "targets": ["q_proj", "up_proj"]}
    )  # type: ignore[arg-type]
    make_trainer(4, callbacks=[HFExport()]).fit(module, lm_data())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    again = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    with torch.no_grad():
        trained, before = module.network.eval()(TOKENS).logits, base.network.eval()(TOKENS).logits
        torch.testing.assert_close(exported(TOKENS).logits, trained, atol=1e-5, rtol=0)
        torch.testing.assert_close(again(TOKENS).logits, trained, atol=1e-6, rtol=0)
    assert (trained - before).abs().max() > 0.01
    assert not any("lora" in name or "base_layer" in name for name in exported.state_dict())


def test_a_checkpoint_brings_the_adapters_back(dense_fields, lm_data, make_trainer, tmp_path: Path) -> None:
    module = adapted(dense_fields)
    trainer = make_trainer(2)
    trainer.fit(module, lm_data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = CausalLM.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.lora == module.lora
    again = loaded.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in module.state_dict().items())


def test_layers_that_are_not_there_are_refused(dense_fields) -> None:
    with pytest.raises(UserError, match=r"lora.targets is \['q_projj'\].*Name linear layers"):
        adapted(dense_fields, targets=["q_projj"])
    for rank in (0, -1):
        with pytest.raises(UserError, match=f"lora: rank {rank} must be at least 1"):
            adapted(dense_fields, rank=rank)
    for dropout in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match=rf"dropout {dropout} in \[0, 1\)"):
            adapted(dense_fields, dropout=dropout)
    for alpha in (float("nan"), float("inf"), 0.0):
        with pytest.raises(UserError, match=f"alpha {alpha} a number above 0"):
            adapted(dense_fields, alpha=alpha)
    with pytest.raises(UserError, match="lora field 'r' is unknown"):
        adapted(dense_fields, r=4)


def test_training_stops_when_validation_does_not_improve_and_exports_the_best(
    moe_fields, lm_data, make_trainer, tmp_path: Path
) -> None:
    """The best is the highest loss here, so that it is sure to be the first, and not the last."""
    module = CausalLM(moe_fields, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0))
    best = ModelCheckpoint(tmp_path / "c", monitor="val/loss", mode="max", save_top_k=1, filename="best")
    trainer = make_trainer(
        40,
        limit_val_batches=2,
        val_check_interval=2,  # Lightning takes 1 for 1.0, an epoch
        enable_checkpointing=True,
        callbacks=[best, EarlyStopping("val/loss", mode="max", patience=2), HFExport(weights="best")],
    )
    trainer.fit(module, lm_data())
    assert trainer.global_step == 6
    kept = torch.load(best.best_model_path, weights_only=True)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert kept["global_step"] == 2
    assert all(torch.equal(exported[name.removeprefix("model.")], v) for name, v in kept["state_dict"].items())


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (None, {}, "HFExport.weights is best, and no checkpoint is monitored.*monitor: val/loss"),
        (ModelCheckpoint, {"limit_val_batches": 0}, "ModelCheckpoint.monitor is val/loss, and .* validates nothing"),
        (
            EarlyStopping,
            {"limit_val_batches": 0},
            "EarlyStopping.monitor is val/loss, and .*validates nothing.*val_path",
        ),
        (
            partial(EarlyStopping, monitor="train/loss", check_on_train_epoch_end=False),
            {"limit_val_batches": 0},
            "EarlyStopping.monitor is train/loss, looked at after each validation, and .*validates nothing",
        ),
        (EarlyStopping, {"val_check_interval": 9}, "first validation would come after 9 batches.*max_steps = 2"),
        (EarlyStopping, {"check_val_every_n_epoch": 2, "val_check_interval": 9}, "would come after 9 batches"),
    ],
)
def test_what_would_wait_in_vain_for_a_validation_is_refused_before_the_first_step(
    moe_fields, lm_data, make_trainer, tmp_path: Path, callback: Any, options: dict[str, Any], message: str
) -> None:
    if isinstance(callback, type):
        callback = partial(callback, monitor="val/loss")
    callbacks = [callback() if callback else HFExport(weights="best")]
    trainer = make_trainer(2, enable_checkpointing=True, callbacks=callbacks, **({"limit_val_batches": 1} | options))
    with pytest.raises(UserError, match=message):
        trainer.fit(CausalLM(moe_fields), lm_data())
    assert trainer.global_step == 0


def test_waiting_for_a_validation_that_comes_is_allowed(moe_fields, lm_data, make_trainer) -> None:
    """At the last step, or in an epoch whose data are not loaded yet."""
    stop = EarlyStopping("val/loss", patience=9)
    make_trainer(2, callbacks=[stop], limit_val_batches=1, val_check_interval=2).fit(CausalLM(moe_fields), lm_data())
    assert stop.best_score < 9
    stop = EarlyStopping("val/loss", patience=9)
    epochs = {"max_epochs": 2, "limit_train_batches": 1, "check_val_every_n_epoch": 2}
    make_trainer(-1, callbacks=[stop], limit_val_batches=1, **epochs).fit(CausalLM(moe_fields), lm_data())
    assert stop.best_score < 9


@pytest.mark.parametrize("callback", [ModelCheckpoint, EarlyStopping])
def test_a_monitor_that_no_validation_gives_ends_the_run_with_those_that_it_does(
    moe_fields, lm_data, make_trainer, callback: Any
) -> None:
    trainer = make_trainer(4, enable_checkpointing=True, callbacks=[callback(monitor="val/los")], limit_val_batches=1)
    trainer.val_check_interval = 2
    with pytest.raises((RuntimeError, MisconfigurationException)) as raised:
        trainer.fit(CausalLM(moe_fields), lm_data())
    assert trainer.global_step == 2
    explained = _mistake(raised.value, [])
    assert explained and "val/los" in str(explained) and "val/perplexity" in str(explained)


def test_a_best_that_was_never_measured_is_not_exported(moe_fields, lm_data, make_trainer, tmp_path: Path) -> None:
    unseen = ModelCheckpoint(tmp_path / "u", monitor="val/loss", save_top_k=1, save_on_train_epoch_end=False)
    late = {"max_epochs": 1, "limit_train_batches": 1, "val_check_interval": 5, "check_val_every_n_epoch": None}
    callbacks = [unseen, HFExport(weights="best")]
    trainer = make_trainer(-1, enable_checkpointing=True, callbacks=callbacks, limit_val_batches=1, **late)
    with pytest.raises(UserError, match="val/loss was never measured.*data.val_path"):
        trainer.fit(CausalLM(moe_fields), lm_data())

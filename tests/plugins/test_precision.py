"""The precision names and the plugin in Trainer, Fabric, YAML and command line."""

import copy
import sys

import lightning
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tiny_models import ARCHITECTURES, UserModule, loader, quiet_trainer, same_state, tiny_model, tokens
from torch import nn

import lightning_nvfp4
from lightning_nvfp4 import PRESETS, BlockScaledPrecision
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.nn.convert import context_of
from lightning_nvfp4.nn.linear import BlockScaledLinear
from lightning_nvfp4.plugins.precision import FabricBlockScaledPrecision

KEEP_EVERYTHING = {"roles": {}}


def fit(model, steps=2, precision="nvfp4-hybrid", **arguments):
    module = UserModule(model)
    trainer = quiet_trainer(steps, **({"precision": precision} if precision else {}), **arguments)
    trainer.fit(module, loader())
    return module


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_trains_in_every_preset(name, preset):
    model = tiny_model(name)
    before = copy.deepcopy(model.state_dict())
    module = fit(model, precision=preset)
    assert all(torch.tensor(module.losses).isfinite())
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.dtype == torch.float32
    assert not all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    if model.config.tie_word_embeddings:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("preset", PRESETS)
def test_name_and_instance_give_the_same_plugin(preset):
    by_name = quiet_trainer(precision=preset)
    by_plugin = quiet_trainer(plugins=[BlockScaledPrecision(preset)])
    alone = quiet_trainer(plugins=BlockScaledPrecision(preset))
    for trainer in (by_name, by_plugin, alone):
        assert type(trainer.precision_plugin) is BlockScaledPrecision
        assert trainer.precision == preset
        assert trainer.precision_plugin.arguments == by_name.precision_plugin.arguments


def test_fabric_takes_names_and_instances():
    for arguments in ({"precision": "nvfp4-hybrid"}, {"plugins": [BlockScaledPrecision("nvfp4-hybrid")]}):
        fabric = lightning.Fabric(accelerator="cpu", devices=1, **arguments)
        assert type(fabric._precision) is FabricBlockScaledPrecision
        model = tiny_model()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens(), labels=tokens()).loss
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        assert fabric._precision.state_dict() == {"step": 3}


def test_fabric_with_two_models_seeds_and_restores_both():
    fabric = lightning.Fabric(precision="nvfp4-hybrid", accelerator="cpu", devices=1)
    plain = [nn.Linear(32, 32), nn.Linear(32, 32)]
    pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in plain]
    seeds = []
    for _ in range(2):
        for net, optimizer in pairs:
            fabric.backward(net(torch.randn(4, 32)).sum())
            optimizer.step()
            seeds.append(context_of(net).step_seed)
    assert len(set(seeds)) == 4
    assert context_of(plain[0]).step_seed != context_of(plain[1]).step_seed
    fabric._precision.teardown()
    assert all(type(net) is nn.Linear for net in plain)


@pytest.mark.parametrize("preset", ["nvfp4-hybrid", "nvfp4"])
def test_fabric_recomputes_what_several_forwards_of_one_backward_did(preset):
    states = []
    for recompute in (False, True):
        fabric = lightning.Fabric(precision=preset, accelerator="cpu", devices=1)
        model = tiny_model()
        if recompute:
            model.activation_checkpointing_enable()
        model.train()
        net, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            optimizer.zero_grad()
            losses = [net(input_ids=batch, labels=batch).loss for batch in (tokens(seed=step), tokens(seed=9 + step))]
            fabric.backward(losses[0] + losses[1])
            optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_pytorch_lightning_works_as_lightning_does():
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        training_step = UserModule.training_step
        losses: list[float] = []
        lr = 1e-3
        configure_optimizers = UserModule.configure_optimizers

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 2}
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=1, precision="nvfp4-hybrid", enable_model_summary=False, **quiet
    )
    assert isinstance(trainer.precision_plugin, pytorch_lightning.plugins.precision.MixedPrecision)
    model = tiny_model()
    trainer.fit(Module(model), loader())
    other = tiny_model()
    fit(other)
    assert same_state(model, other)
    by_plugin = pytorch_lightning.Trainer(
        plugins=[BlockScaledPrecision("mxfp8")], accelerator="cpu", devices=1, **quiet
    )
    assert by_plugin.precision == "mxfp8"


def run_cli(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["cli", *arguments])
    return LightningCLI(
        BoringModel, BoringDataModule, run=False, save_config_callback=None, seed_everything_default=False
    )


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_stock_lightning_cli_accepts_the_names(monkeypatch, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("trainer:\n  precision: nvfp4-hybrid\n  accelerator: cpu\n  logger: false\n")
    assert run_cli(monkeypatch, "--config", str(config)).trainer.precision == "nvfp4-hybrid"
    assert run_cli(monkeypatch, "--config", str(config), "--trainer.precision", "mxfp8").trainer.precision == "mxfp8"
    overlay = tmp_path / "o.yaml"
    overlay.write_text(
        "trainer:\n  precision: null\n  plugins:\n    - class_path: lightning_nvfp4.BlockScaledPrecision\n"
        "      init_args:\n        preset: nvfp4\n        overrides: {keep_last_blocks: 2}\n"
    )
    trainer = run_cli(monkeypatch, "--config", str(config), "--config", str(overlay)).trainer
    assert trainer.precision == "nvfp4" and trainer.precision_plugin.recipe.keep_last_blocks == 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", None, "bf16-true"])
def test_other_precisions_take_the_stock_path(precision):
    trainer = quiet_trainer(precision=precision)
    assert type(trainer.precision_plugin).__module__.startswith("lightning.pytorch.plugins.precision")
    assert trainer.precision == (precision or "32-true")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "mxfp8", "strategy": "fsdp"}, ["mxfp8", "fsdp", "ModelParallelStrategy"]),
        ({"precision": "mxfp8", "strategy": "deepspeed_stage_2"}, ["deepspeed", "ModelParallelStrategy"]),
        ({"precision": "mxfp8", "plugins": [BlockScaledPrecision("fp8")]}, ["mxfp8", "fp8", "precision: null"]),
    ],
)
def test_refusals_come_at_construction_with_the_cure(arguments, words):
    with pytest.raises(UserError) as error:
        quiet_trainer(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name", ["nvfp4_hybrid", "NVFP4", "mxpf8", "bf16_gemm"])
def test_a_misspelt_preset_gets_the_nearest_name(name):
    with pytest.raises(UserError, match="Did you mean"):
        quiet_trainer(precision=name)


def test_fabric_refuses_too():
    with pytest.raises(UserError, match="ModelParallelStrategy"):
        lightning.Fabric(precision="mxfp8", strategy="deepspeed", accelerator="cpu")


@pytest.mark.parametrize("arguments", [{"preset": "nvfp5"}, {"overrides": {"keep": 1}}, {"backend": "te"}])
def test_the_plugin_checks_its_arguments_at_construction(arguments):
    with pytest.raises(UserError):
        BlockScaledPrecision(**arguments)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_recipe_that_keeps_everything_is_bitwise_bf16_mixed(name):
    ours, stock = tiny_model(name), tiny_model(name)
    plugin = BlockScaledPrecision("nvfp4-hybrid", overrides=KEEP_EVERYTHING)
    a = fit(ours, 20, precision=None, plugins=[plugin])
    b = fit(stock, 20, precision="bf16-mixed")
    assert a.losses == b.losses
    assert same_state(ours, stock)


def test_a_later_bf16_fit_is_that_of_a_module_that_never_met_us():
    ours = UserModule(tiny_model(experts="grouped_mm"))
    quiet_trainer(3, precision="nvfp4-hybrid").fit(ours, loader())
    never = UserModule(tiny_model(experts="grouped_mm"))
    never.load_state_dict(ours.state_dict())
    for module in (ours, never):
        quiet_trainer(3, precision="bf16-mixed").fit(module, loader())
    assert same_state(ours, never)
    assert not any(isinstance(m, BlockScaledLinear) for m in ours.modules())


def test_teardown_follows_every_entry_point():
    class WithSteps(UserModule):
        def validation_step(self, batch, batch_idx):
            assert any(isinstance(m, BlockScaledLinear) for m in self.modules())
            return batch

        test_step = predict_step = validation_step

    module = WithSteps(tiny_model())
    limits = {f"limit_{name}_batches": 1 for name in ("val", "test", "predict")}
    trainer = quiet_trainer(1, precision="mxfp8", **limits)
    for run in (trainer.validate, trainer.test, trainer.predict):
        data = torch.utils.data.DataLoader([tokens()[0]])
        run(module, data, **({} if run == trainer.predict else {"verbose": False}))
        assert not any(isinstance(m, BlockScaledLinear) for m in module.modules())


def test_bf16_parameters_are_refused_with_the_cure():
    module = UserModule(tiny_model().bfloat16())
    with pytest.raises(UserError, match=r"model\.float\(\)"):
        quiet_trainer(1, precision="mxfp8").fit(module, loader())
    assert not any(isinstance(m, BlockScaledLinear) for m in module.modules())


@pytest.mark.parametrize("preset", ["nvfp4-hybrid", "nvfp4"])
def test_recompute_on_equals_off_bitwise(preset):
    plain, recomputed = tiny_model(), tiny_model()
    recomputed.activation_checkpointing_enable()
    recomputed.train()
    assert fit(plain, 3, preset).losses == fit(recomputed, 3, preset).losses
    assert same_state(plain, recomputed)


def test_gradient_accumulation_draws_other_bits_for_each_micro_batch_and_replays():
    first, second = tiny_model(), tiny_model()
    fit(first, 3, accumulate_grad_batches=2)
    fit(second, 3, accumulate_grad_batches=2)
    assert same_state(first, second)


def test_the_run_seed_changes_stochastic_rounding_only(monkeypatch):
    models = []
    for seed in ("0", "0", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        models.append(tiny_model())
        fit(models[-1], 2)
    assert same_state(models[0], models[1])
    assert not same_state(models[0], models[2])


@pytest.mark.parametrize("later", ["bf16-gemm", "fp8", "bf16-mixed"])
def test_a_checkpoint_continues_in_another_precision(tmp_path, later):
    module = UserModule(tiny_model())
    trainer = quiet_trainer(2, precision="nvfp4-hybrid")
    trainer.fit(module, loader())
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert not any("block_scaled" in key or "_extra_state" in key for key in state)
    other = UserModule(tiny_model(seed=1))
    quiet_trainer(4, precision=later).fit(other, loader(), ckpt_path=path, weights_only=True)
    assert len(other.losses) == 2 and all(torch.tensor(other.losses).isfinite())


def test_resuming_draws_the_bits_of_an_unbroken_run(tmp_path):
    unbroken = UserModule(tiny_model())
    quiet_trainer(4, precision="nvfp4-hybrid").fit(unbroken, loader())
    first = UserModule(tiny_model())
    trainer = quiet_trainer(2, precision="nvfp4-hybrid")
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    second = UserModule(tiny_model(seed=1))
    quiet_trainer(4, precision="nvfp4-hybrid").fit(second, loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert same_state(unbroken, second)


def test_a_plain_mlp_of_the_user_trains():
    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 1))
            self.losses = []

        def training_step(self, batch, batch_idx):
            x = batch.float() / 128
            loss = (self.net(x[:, :10]).squeeze(1).float() - x.sum(1)).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    with torch.random.fork_rng():
        module = Regression()
    quiet_trainer(20, precision="nvfp4-hybrid").fit(module, loader(length=12))
    assert module.losses[-1] < module.losses[0] / 4


def test_the_public_names_are_there():
    for name in lightning_nvfp4.__all__:
        assert hasattr(lightning_nvfp4, name)


@pytest.mark.parametrize("preset", PRESETS)
def test_odd_sizes_train(preset):
    """Hidden sizes that no block divides, and a batch of one token."""
    sizes = {"hidden_size": 36, "intermediate_size": 50, "head_dim": 10, "moe_intermediate_size": 21}
    for name in ("llama", "qwen3_moe"):
        model = tiny_model(name, **{k: v for k, v in sizes.items() if name != "llama" or not k.startswith("moe")})
        module = fit(model, precision=preset)
        assert all(torch.tensor(module.losses).isfinite())
        plugin = BlockScaledPrecision(preset)
        plugin.convert_module(module)
        with plugin.forward_context():
            logits = model(input_ids=tokens(1, 1)).logits
        logits.float().sum().backward()
        plugin.teardown()
        assert logits.shape == (1, 1, 128) and logits.isfinite().all()

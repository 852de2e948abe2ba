"""`PrecisionSchedule`, `NonfiniteGuard`, and where `SaveOnSigterm` leaves its checkpoint."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny_models import UserModule, loader, quiet_trainer, same_state, tiny_model

from lightning_nvfp4 import NonfiniteGuard, PrecisionSchedule
from lightning_nvfp4.callbacks import SaveOnSigterm
from lightning_nvfp4.callbacks.nonfinite_guard import nonfinite_gradients
from lightning_nvfp4.errors import UserError

EXACT = {"gemms": {role: {} for role in ("experts", "mlp", "linear")}}


def fit(steps, precision, callbacks=(), ckpt=None, **arguments):
    module = UserModule(tiny_model())
    trainer = quiet_trainer(steps, precision=precision, callbacks=list(callbacks), **arguments)
    trainer.fit(module, loader(), ckpt_path=ckpt, weights_only=True if ckpt else None)
    return module, trainer


def test_both_directions_from_step_zero_is_the_control_arm():
    switched, _ = fit(3, "nvfp4-hybrid", [PrecisionSchedule(forward_at=0.0, backward_at=0.0)])
    control, _ = fit(3, "bf16-gemm")
    assert switched.losses == control.losses


@pytest.mark.parametrize("at", [0.5, 3])
def test_the_forward_switch_acts_at_its_step_and_survives_resume(tmp_path, at):
    whole, trainer = fit(6, "nvfp4-hybrid", [PrecisionSchedule(forward_at=at)])
    plain, _ = fit(6, "nvfp4-hybrid")
    assert whole.losses[:3] == plain.losses[:3]
    assert whole.losses[3] != plain.losses[3]
    _, half = fit(4, "nvfp4-hybrid", [PrecisionSchedule(forward_at=3)])
    half.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _ = fit(6, "nvfp4-hybrid", [PrecisionSchedule(forward_at=at)], tmp_path / "a.ckpt")
    assert same_state(whole, resumed)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), float("inf")])
def test_schedule_refuses_values_out_of_range(value):
    with pytest.raises(UserError, match=str(value)):
        PrecisionSchedule(forward_at=value)


def test_schedule_needs_a_block_scaled_precision():
    with pytest.raises(UserError, match="bf16-mixed"):
        fit(1, "bf16-mixed", [PrecisionSchedule()])


@pytest.mark.parametrize("at", [{"forward_at": 0.5}, {"forward_at": None, "backward_at": 0.5}])
def test_a_share_of_epochs_is_that_of_their_steps(at):
    """Two epochs of four batches, two to a step: four steps, and the switch is at the third."""
    of_steps, _ = fit(4, "nvfp4-hybrid", [PrecisionSchedule(**at)], accumulate_grad_batches=2)
    of_epochs = UserModule(tiny_model())
    trainer = quiet_trainer(
        -1, precision="nvfp4-hybrid", callbacks=[PrecisionSchedule(**at)], max_epochs=2, accumulate_grad_batches=2
    )
    trainer.limit_train_batches = 4
    trainer.fit(of_epochs, loader())
    assert trainer.global_step == 4 and of_epochs.losses == of_steps.losses


@pytest.mark.parametrize("max_epochs, data", [(-1, loader()), (1, (batch for batch in loader()))])
def test_a_share_of_a_run_without_an_end_is_refused_before_the_first_step(max_epochs, data):
    module = UserModule(tiny_model())
    trainer = quiet_trainer(-1, precision="mxfp8", callbacks=[PrecisionSchedule(0.5)], max_epochs=max_epochs)
    with pytest.raises(UserError, match=r"0\.5.*max_steps"):
        trainer.fit(module, data)
    assert not module.losses


def test_a_step_of_an_endless_run_needs_no_length():
    module = UserModule(tiny_model())
    trainer = quiet_trainer(-1, precision="mxfp8", callbacks=[PrecisionSchedule(1)], max_epochs=1)
    trainer.limit_train_batches = 2
    trainer.fit(module, loader())
    assert module.losses == fit(2, "mxfp8", [PrecisionSchedule(1)])[0].losses


class Poisoned(UserModule):
    """Step 1 has a NaN in one hidden state."""

    poison = float("nan")

    def training_step(self, batch, batch_idx):
        handle = None
        if batch_idx == 1:

            def hook(module, args):
                x = args[0].clone()
                x.view(-1, x.shape[-1])[0, 5] = self.poison
                return (x, *args[1:])

            handle = self.model.model.layers[0].mlp.experts.register_forward_pre_hook(hook)
        loss = super().training_step(batch, batch_idx)
        if handle:
            handle.remove()
        return loss


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("precision", ["nvfp4-hybrid", "nvfp4", "mxfp8", "fp8", "bf16-gemm"])
def test_a_nonfinite_operand_stops_the_run_before_the_step(precision, poison):
    module = Poisoned(tiny_model())
    module.poison = poison
    one = UserModule(tiny_model())
    quiet_trainer(1, precision=precision).fit(one, loader())
    with pytest.raises(UserError, match="step 1.*nothing was saved"):
        quiet_trainer(3, precision=precision, callbacks=[NonfiniteGuard()]).fit(module, loader())
    assert same_state(module, one)


def test_skip_leaves_the_step_out_and_goes_on():
    module = Poisoned(tiny_model())
    with pytest.warns(UserWarning, match="step 1 left out"):
        quiet_trainer(3, precision="mxfp8", callbacks=[NonfiniteGuard("skip")]).fit(module, loader())
    assert all(p.isfinite().all() for p in module.parameters())


def test_skipping_ends_after_the_limit():
    class Always(Poisoned):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, 1)

    guard = NonfiniteGuard("skip", max_skips=2)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(UserError, match="non-finite gradient"):
        quiet_trainer(9, precision="mxfp8", callbacks=[guard]).fit(Always(tiny_model()), loader())
    assert guard.state_dict() == {"skips": 3}


def test_huge_finite_gradients_are_finite():
    module = torch.nn.Linear(4, 4)
    module.weight.grad = torch.full((4, 4), 3e38)
    module.bias.grad = torch.zeros(4)
    assert nonfinite_gradients(module) == []
    module.bias.grad[1] = float("inf")
    assert nonfinite_gradients(module) == ["bias"]


@pytest.mark.parametrize("arguments", [{"action": "stop"}, {"max_skips": 0}])
def test_guard_refuses_unknown_actions(arguments):
    with pytest.raises(UserError):
        NonfiniteGuard(**arguments)


@pytest.mark.parametrize("preset", ["nvfp4-hybrid", "nvfp4", "mxfp8", "fp8"])
def test_tiny_gradients_train_on(preset):
    """A loss scaled to gradients of about 1e-38 gives zero or tiny updates, never NaN."""

    class Tiny(UserModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e-37

    module = Tiny(tiny_model())
    quiet_trainer(2, precision=preset, callbacks=[NonfiniteGuard()]).fit(module, loader())
    assert all(p.isfinite().all() for p in module.parameters())


class Terminated(Callback):
    """As Lightning does after the step during which SIGTERM came."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        raise SIGTERMException


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*:UserWarning")
@pytest.mark.parametrize("counts", [True, False, None])
def test_sigterm_overwrites_no_checkpoint_but_the_one_it_continues(tmp_path, counts):
    """Neither with a `ModelCheckpoint` that does not count versions, nor without one (None)."""

    def terminated(ckpt=None):
        keep = [] if counts is None else [ModelCheckpoint(tmp_path, save_last=True, enable_version_counter=counts)]
        callbacks = [*keep, SaveOnSigterm(), Terminated()]
        trainer = quiet_trainer(9, callbacks=callbacks, enable_checkpointing=bool(keep), default_root_dir=tmp_path)
        with pytest.raises(SystemExit):
            trainer.fit(UserModule(tiny_model()), loader(), ckpt_path=ckpt, weights_only=True if ckpt else None)
        return {path.name: torch.load(path, weights_only=True)["global_step"] for path in tmp_path.glob("*.ckpt")}

    assert terminated() == {"last.ckpt": 1}
    assert terminated(tmp_path / "last.ckpt") == {"last.ckpt": 2}
    assert terminated() == {"last.ckpt": 2, "last-v1.ckpt": 1}
    assert terminated() == {"last.ckpt": 2, "last-v1.ckpt": 1, "last-v2.ckpt": 1}
    assert terminated(tmp_path / "last-v1.ckpt") == {"last.ckpt": 2, "last-v1.ckpt": 2, "last-v2.ckpt": 1}

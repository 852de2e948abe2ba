"""A run that was killed and resumed has the weights of one that was not, bit for bit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nvfp4.callbacks import SaveOnSigterm
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig, ScheduleConfig
from lightning_nvfp4.lm.rl.grpo import GRPO

# Lightning's remark on what a resumed run is meant to find.
pytestmark = pytest.mark.filterwarnings("ignore:.*exists and is not empty.*:UserWarning")


def low_token_reward(completions: list[str], references: list[dict[str, Any]]) -> list[float]:
    """The share of low tokens: varies within groups, so that every step has a gradient."""
    shares = [[int(word[1:]) < 35 for word in text.split() if word[1:].isdecimal()] for text in completions]
    return [sum(share) / max(len(share), 1) for share in shares]


def module_of(kind: str, fields: dict[str, Any]) -> CausalLM:
    settings: dict[str, Any] = {
        "model": fields,
        "optimizer": OptimizerConfig(lr=5e-3),
        "schedule": ScheduleConfig(kind="cosine", warmup_steps=2, decay_steps=20),
        "seed": 1,
    }
    if kind == "lm":
        return CausalLM(**settings)
    return GRPO(**settings, group_size=4, max_new_tokens=5, reward=low_token_reward, beta=0.05)


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1, save_top_k=1)


class Kill(Callback):
    """Dies as a machine does, after the checkpoint of `step` is written and some of the next step is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def data_of(lm_data: Any, prompt_data: Any) -> Any:
    return {"lm": lm_data, "grpo": prompt_data}


@pytest.mark.parametrize(("kind", "precision"), [("lm", "bf16-mixed"), ("lm", "32-true"), ("grpo", "bf16-mixed")])
def test_a_killed_run_resumes_bitwise(
    kind: str, precision: str, moe_fields: dict[str, Any], data_of: Any, make_trainer: Any, tmp_path: Path
) -> None:
    def fit(steps: int, folder: Path, *callbacks: Callback, **options: Any) -> CausalLM:
        module = module_of(kind, moe_fields)
        trainer = make_trainer(
            steps,
            default_root_dir=folder,
            precision=precision,
            gradient_clip_val=1.0,
            enable_checkpointing=True,
            callbacks=[checkpoints(folder), *callbacks],
        )
        trainer.fit(module, data_of[kind](), **options)
        return module

    straight = fit(6, tmp_path / "straight")
    process = multiprocessing.get_context("fork").Process(target=fit, args=(6, tmp_path / "killed", Kill(3)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    last = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 3
    torch.manual_seed(99)  # another process has another random state
    resumed = fit(6, tmp_path / "killed", ckpt_path=last)
    start, end, again = module_of(kind, moe_fields), straight.state_dict(), resumed.state_dict()
    start.configure_model()
    assert end.keys() == again.keys() and all(torch.equal(end[name], again[name]) for name in end)
    assert not torch.equal(end["model.lm_head.weight"], start.state_dict()["model.lm_head.weight"])
    if kind == "grpo":
        logs = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("straight", "killed")]
        assert logs[0] == logs[1] and logs[0].count("\n") == 6 * 2 * 2


def test_a_run_that_is_killed_in_its_first_step_after_a_resume_goes_on_bitwise(
    moe_fields: dict[str, Any], lm_data: Any, make_trainer: Any, tmp_path: Path
) -> None:
    """Between two micro-batches: what was saved before is still what the checkpoint holds."""

    class Stop(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == self.batch:
                raise _Killed

        def __init__(self, batch: int) -> None:
            self.batch = batch

    def fit(folder: Path, *callbacks: Callback, **options: Any) -> CausalLM:
        module = module_of("lm", moe_fields)
        trainer = make_trainer(
            4,
            default_root_dir=folder,
            precision="nvfp4-hybrid",
            accumulate_grad_batches=2,
            enable_checkpointing=True,
            callbacks=[checkpoints(folder), *callbacks],
        )
        with contextlib.suppress(_Killed):
            trainer.fit(module, lm_data(), **options)
        return module

    straight, folder = fit(tmp_path / "straight").state_dict(), tmp_path / "killed"
    last = folder / "checkpoints" / "last.ckpt"
    fit(folder, Stop(4))
    fit(folder, Stop(5), ckpt_path=last)
    again = fit(folder, ckpt_path=last).state_dict()
    assert all(torch.equal(straight[name], again[name]) for name in straight)


class _Killed(Exception):
    pass


@pytest.mark.parametrize("during", ["training", "accumulation", "validation"])
def test_sigterm_saves_and_the_run_goes_on_bitwise(
    during: str, moe_fields: dict[str, Any], lm_data: Any, make_trainer: Any, tmp_path: Path
) -> None:
    class Terminate(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if during == "accumulation" and batch_idx == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if during == "training" and trainer.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if during == "validation" and batch_idx == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def fit(folder: Path, *callbacks: Callback, **options: Any) -> CausalLM:
        module = module_of("lm", moe_fields)
        trainer = make_trainer(
            5,
            default_root_dir=folder,
            precision="nvfp4-hybrid",
            val_check_interval=4 if during == "accumulation" else 2,
            accumulate_grad_batches=2 if during == "accumulation" else 1,
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder, save_last=True, save_top_k=0), SaveOnSigterm(), *callbacks],
        )
        trainer.fit(module, lm_data(), **options)
        return module

    straight = fit(tmp_path / "straight")
    process = multiprocessing.get_context("fork").Process(target=fit, args=(tmp_path / "ended", Terminate()))
    process.start()
    process.join()
    assert process.exitcode == 0
    last = tmp_path / "ended" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 2
    before = last.read_bytes()
    process = multiprocessing.get_context("fork").Process(target=fit, args=(tmp_path / "ended", Terminate()))
    process.start()
    process.join()
    assert last.read_bytes() == before, "another run's"
    assert torch.load(last.with_name("last-v1.ckpt"), weights_only=True)["global_step"] == 2
    end, again = straight.state_dict(), fit(tmp_path / "ended", ckpt_path=last).state_dict()
    assert all(torch.equal(end[name], again[name]) for name in end)


def test_a_checkpoint_continues_under_another_schedule(
    moe_fields: dict[str, Any], lm_data: Any, make_trainer: Any, tmp_path: Path
) -> None:
    """The decay stage: the stable stage's weights and moments, the new configuration's rates."""
    rates: list[float] = []

    class Rates(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            rates.extend({group["lr"] for group in optimizer.param_groups})

    def fit(steps: int, schedule: ScheduleConfig, lr: float, **options: Any) -> Any:
        trainer = make_trainer(steps, callbacks=[Rates()])
        trainer.fit(CausalLM(moe_fields, optimizer=OptimizerConfig(lr=lr), schedule=schedule), lm_data(), **options)
        return trainer

    stable = fit(4, ScheduleConfig(kind="wsd", warmup_steps=2), lr=0.5)
    assert rates == [0.25, 0.5, 0.5, 0.5]
    stable.save_checkpoint(tmp_path / "stable.ckpt")
    rates.clear()
    decay = ScheduleConfig(kind="wsd", warmup_steps=2, decay_start=4, decay_steps=4, decay_shape="linear")
    trainer = fit(8, decay, lr=0.25, ckpt_path=tmp_path / "stable.ckpt")
    assert rates == [0.25, 0.1875, 0.125, 0.0625]
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {8.0}

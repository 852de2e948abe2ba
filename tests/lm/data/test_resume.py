"""A run that is stopped anywhere and resumed from its last checkpoint trains on the batches of an unstopped one."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nvfp4.lm.data import ChatData, PromptData, TextData

# every run has a folder of its own
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Recorder(pl.LightningModule):
    """Keeps the batches that it was trained and validated on."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[list[int]]] = []
        self.validated = 0
        self._fail_at = fail_at

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        if len(self.seen) == self._fail_at:
            raise KeyError("stopped")
        self.seen.append(batch["input_ids"].tolist())
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    for name in "ab":
        rows = [{"question": f"{name} {i} " + "x" * (i % 9), "answer": f"#### {i}"} for i in range(11)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "*.jsonl")


def make(kind: str, path: str, tokenizer: str, **kwargs: Any) -> pl.LightningDataModule:
    common: dict[str, Any] = {"path": path, "tokenizer": tokenizer, "shuffle_rows": 4, **kwargs}
    if kind == "text":
        return TextData(text_field="question", val_path=path, sequence_length=8, batch_size=2, **common)
    if kind == "chat":
        return ChatData(val_path=path, batch_size=2, **common)
    return PromptData(prompts_per_step=2, **common)


def fit(
    data: pl.LightningDataModule,
    folder: Path,
    steps: int,
    resume: Path | None = None,
    module: Recorder | None = None,
    **kwargs: Any,
) -> Recorder:
    module = module or Recorder()
    checkpoints = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints],
        max_steps=steps,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **kwargs,
    )
    trainer.fit(module, data, ckpt_path=None if resume is None else str(resume), weights_only=True)
    return module


@pytest.mark.parametrize("kind", ["text", "chat", "prompts"])
@pytest.mark.parametrize(
    ("accumulate", "arguments", "options"),
    [
        (1, {}, {}),
        (2, {}, {}),
        (2, {"num_workers": 1}, {"val_check_interval": 3, "limit_val_batches": 2}),
        (1, {"batches_per_epoch": 5}, {"limit_val_batches": 1}),
        (1, {}, {"val_check_interval": 4, "check_val_every_n_epoch": None, "limit_val_batches": 1}),
    ],
    ids=["plain", "accumulate", "accumulate-validate-thread", "short-epochs", "validate-by-batches"],
)
def test_resume_is_exact(
    kind: str, accumulate: int, arguments: Any, options: Any, rows: str, tokenizer_folder: str, tmp_path: Path
) -> None:
    def run(folder: str, steps: int, resume: Path | None = None) -> Recorder:
        data = make(kind, rows, tokenizer_folder, **arguments)
        return fit(data, tmp_path / folder, steps, resume, accumulate_grad_batches=accumulate, **options)

    whole = run("whole", 12)
    assert len(whole.seen) == 12 * accumulate
    assert whole.validated > 0 or kind == "prompts" or "limit_val_batches" not in options
    for step in (4, 5, 7):
        resumed = run(f"resumed-{step}", 12, tmp_path / "whole" / f"step={step}.ckpt")
        assert resumed.seen == whole.seen[step * accumulate :], f"resumed from step {step}"


def test_a_second_resume_and_a_longer_run(rows: str, tokenizer_folder: str, tmp_path: Path) -> None:
    """As the decay stage does it: the checkpoint of a finished run goes on with more steps."""
    whole = fit(make("text", rows, tokenizer_folder), tmp_path / "whole", 15)
    first = fit(make("text", rows, tokenizer_folder), tmp_path / "first", 5)
    second = fit(make("text", rows, tokenizer_folder), tmp_path / "second", 9, tmp_path / "first" / "step=5.ckpt")
    third = fit(make("text", rows, tokenizer_folder), tmp_path / "third", 15, tmp_path / "second" / "step=9.ckpt")
    assert first.seen + second.seen + third.seen == whole.seen


def test_other_data_go_on_with_the_model_but_begin_anew(rows: str, tokenizer_folder: str, tmp_path: Path) -> None:
    fit(make("text", rows, tokenizer_folder), tmp_path / "first", 5)
    checkpoint = tmp_path / "first" / "step=5.ckpt"
    other = fit(make("text", rows, tokenizer_folder, seed=1), tmp_path / "other", 8, checkpoint)
    alone = fit(make("text", rows, tokenizer_folder, seed=1), tmp_path / "alone", 3)
    assert other.seen == alone.seen
    assert other.weight.item() == pytest.approx(-0.8)


def test_a_step_that_failed_is_trained_again(rows: str, tokenizer_folder: str, tmp_path: Path) -> None:
    class Emergency(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            trainer.save_checkpoint(tmp_path / "emergency.ckpt")

    whole = fit(make("text", rows, tokenizer_folder), tmp_path / "whole", 8)
    module = Recorder(fail_at=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Emergency()],
        max_steps=8,
        limit_val_batches=0,
    )
    with pytest.raises(KeyError, match="stopped"):
        trainer.fit(module, make("text", rows, tokenizer_folder))
    resumed = fit(make("text", rows, tokenizer_folder), tmp_path / "resumed", 8, tmp_path / "emergency.ckpt")
    assert module.seen + resumed.seen == whole.seen


class Killed(Recorder):
    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        if len(self.seen) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def _run_until_killed(rows: str, tokenizer: str, folder: Path) -> None:
    torch.set_num_threads(1)
    fit(make("text", rows, tokenizer, num_workers=1), folder, 8, module=Killed())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_resume_after_a_kill(rows: str, tokenizer_folder: str, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    child = multiprocessing.get_context("fork").Process(target=_run_until_killed, args=(rows, tokenizer_folder, folder))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert sorted(file.name for file in folder.glob("*.ckpt")) == [f"step={step}.ckpt" for step in range(1, 6)]
    resumed = fit(make("text", rows, tokenizer_folder), tmp_path / "resumed", 8, folder / "step=5.ckpt")
    whole = fit(make("text", rows, tokenizer_folder), tmp_path / "whole", 8)
    assert resumed.seen == whole.seen[5:]

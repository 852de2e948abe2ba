"""What the progress bar counts, in a run from its start, resumed, and with several batches a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from tiny_models import UserModule, loader, quiet_trainer, tiny_model

from lightning_nvfp4.commands.progress_bar import StepProgressBar


class Shown(Callback):
    """The numbers of the bar after every batch."""

    def __init__(self, bar: StepProgressBar) -> None:
        self.bar, self.numbers = bar, []

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.bar.progress is not None and self.bar.train_progress_bar_id is not None
        task = self.bar.progress.tasks[self.bar.train_progress_bar_id]
        self.numbers.append((int(task.completed), task.total))


def shown(steps: int, ckpt: Path | None = None, save: Path | None = None, **options: Any) -> list[tuple[int, Any]]:
    bar = StepProgressBar()
    seen = Shown(bar)
    trainer = quiet_trainer(steps, enable_progress_bar=True, callbacks=[bar, seen], **options)
    trainer.fit(UserModule(tiny_model()), loader(), ckpt_path=ckpt, weights_only=True if ckpt else None)
    if save:
        trainer.save_checkpoint(save)
    return seen.numbers


def test_it_counts_the_steps_of_the_whole_run_also_after_a_resume(tmp_path: Path) -> None:
    assert shown(2, save=tmp_path / "a.ckpt") == [(1, 2), (2, 2)]
    assert shown(5, tmp_path / "a.ckpt") == [(3, 5), (4, 5), (5, 5)]


def test_batches_of_one_step_count_once() -> None:
    assert shown(2, accumulate_grad_batches=2) == [(0, 2), (1, 2), (1, 2), (2, 2)]


def test_without_a_number_of_steps_it_counts_batches() -> None:
    assert shown(-1, max_epochs=1, limit_train_batches=3) == [(1, 3), (2, 3), (3, 3)]

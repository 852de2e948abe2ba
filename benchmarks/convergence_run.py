"""One run of `convergence.py`: an arm and a seed, trained by a Trainer as a user's would be, killed and continued.

    FOLDER/start.json             identity of the run, hash of the initial weights and of the first batches
    FOLDER/metrics.csv            `train/loss` of every step, `train/grad_norm`, `train/lr`, `val/loss` of a part of the
                                  held-out text
    FOLDER/checkpoints/last.ckpt  while it is unfinished
    FOLDER/numerics/metrics.csv   of `NumericsMonitor`, where asked for
    FOLDER/result.json            once it has finished, or diverged

A run that is killed at any moment goes on from its last checkpoint and ends with the same bits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import torch
from convergence_settings import Arm, Plan
from convergence_tokens import TokenData
from lightning.pytorch import Callback, LightningModule, Trainer
from timing import hardware

from lightning_nvfp4 import BlockScaledPrecision, NumericsMonitor, PrecisionSchedule
from lightning_nvfp4.commands.metrics_log import RunCSVLogger
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig
from lightning_nvfp4.plugins.checkpoint_io import AtomicCheckpointIO

_LOGGED = ("train/loss", "train/grad_norm", "train/lr")
_FLUSH_EVERY = 50
_FIRST_BATCHES = 4
_EXPECTED = r".*(LeafSpec|resuming from a checkpoint|no `val_dataloader`|GPU available but not used).*"


@dataclass(frozen=True)
class Options:
    """How a run is run; nothing here changes its numbers.

    Attributes:
        deadline: `time.time()` after which no step starts.
        parent: process that has to be alive.
        keep: leave the checkpoint of the finished run.
        backend: of the quantizers and GEMMs.
        monitor: steps between two observations of the numerics; 0 for none.
    """

    deadline: float = math.inf
    parent: int | None = None
    keep: bool = False
    backend: str = "auto"
    monitor: int = 0


def run_folder(out: Path, plan: Plan, arm: Arm, seed: int) -> Path:
    """Return where a run's files are."""
    return out / f"{plan.size.tokens}-tokens" / arm.folder / f"seed-{seed}"


def train(plan: Plan, arm: Arm, seed: int, tokens: Path, out: Path, options: Options) -> str:
    """Train one run, or what is left of it; return ``finished``, ``diverged``, ``stopped`` or ``busy``.

    Raises:
        UserError: the folder holds another run, or its data or initial weights are not those of the other arms.
    """
    folder = run_folder(out, plan, arm, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock") as mine:
        if not mine:
            return "busy"
        data = TokenData(tokens, plan.size.sequence_length, plan.size.batch_size, seed, plan.size.val_batches)
        if data.num_batches < plan.size.steps:
            raise UserError(
                f"{tokens} has {data.num_batches} batches and the run takes {plan.size.steps}: text is not repeated. "
                "Prepare more, or lower tokens."
            )
        identity = plan.identity(arm, seed, data.about)
        if (result := read_json(folder / "result.json")) is not None:
            same_identity(folder, result, identity)
            return result["status"]
        return _train(plan, arm, seed, data, folder, identity, options)


def _train(plan: Plan, arm: Arm, seed: int, data: TokenData, folder: Path, identity: str, options: Options) -> str:
    size = plan.size
    lightning.seed_everything(seed, verbose=False)
    model = CausalLM(
        model=size.model(data.about["vocab_size"]),
        optimizer=OptimizerConfig(**size.optimizer),
        schedule=size.schedule(),
        seed=seed,
    )
    evidence = Evidence(plan, arm, seed, data, folder, identity, options)
    callbacks: list[Callback] = [evidence]
    if arm.schedule is not None:
        callbacks.append(PrecisionSchedule(**arm.schedule))
    if options.monitor:
        callbacks.append(NumericsMonitor(every_n_steps=options.monitor))
    checkpoint = folder / "checkpoints" / "last.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_EXPECTED)
        trainer = Trainer(
            accelerator="auto",
            devices=1,
            max_steps=size.steps,
            gradient_clip_val=1.0,
            plugins=[BlockScaledPrecision(arm.precision, _plain(arm.overrides), options.backend), AtomicCheckpointIO()],
            callbacks=callbacks,
            logger=RunCSVLogger(folder / "numerics") if options.monitor else False,
            # Each of these costs time in every step, or writes what nobody reads.
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=10**9,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )
        try:
            trainer.fit(
                model,
                train_dataloaders=data.train_dataloader(),
                ckpt_path=checkpoint if checkpoint.is_file() else None,
                weights_only=True if checkpoint.is_file() else None,
            )
        except Diverged:
            evidence.finish(trainer, "diverged")
    return evidence.status


class Diverged(Exception):
    """The loss is not finite."""


class Evidence(Callback):
    """Measures and stops a run. What it keeps on the way is written before each checkpoint, so that both agree."""

    def __init__(
        self, plan: Plan, arm: Arm, seed: int, data: TokenData, folder: Path, identity: str, options: Options
    ) -> None:
        self.plan, self.arm, self.seed, self.data = plan, arm, seed, data
        self.folder, self.identity, self.options = folder, identity, options
        self.csv = RunCSVLogger(folder, flush_logs_every_n_steps=10**9)
        self.pending: list[tuple[int, dict[str, Any]]] = []
        self.seconds, self.starts = 0.0, 0
        self.status = "stopped"
        size = plan.size
        self.points = {round((i + 1) * size.steps / size.curve_points) for i in range(size.curve_points)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the start with that of the other arms: same seed, same data, same weights."""
        self.starts += 1
        batches = _hash(batch["input_ids"] for batch in itertools.islice(self.data.train_dataloader(), _FIRST_BATCHES))
        before = read_json(self.folder / "start.json")
        if before is not None:
            same_identity(self.folder, before, self.identity)
        fresh = trainer.global_step == 0
        weights = _hash(p for _, p in sorted(pl_module.named_parameters())) if fresh else (before or {}).get("weights")
        mine = {"identity": self.identity, "weights": weights, "batches": batches}
        for path in sorted(self.folder.parents[1].glob(f"*/seed-{self.seed}/start.json")):
            other = read_json(path) or {}
            for what in ("weights", "batches"):
                if other.get(what) != mine[what]:
                    raise UserError(
                        f"{path}: {what} at the start of this run are not those of {self.folder}, though the seed is "
                        f"{self.seed} in both: the arms cannot be compared. Give a fresh --out."
                    )
        write_json(self.folder / "start.json", mine)
        self.clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's numbers on the device; measure, save and stop where it is time for it."""
        step = trainer.global_step
        metrics = trainer.callback_metrics
        row = {name: metrics[name].detach().clone() for name in _LOGGED if name in metrics}
        last = step >= self.plan.size.steps
        if step in self.points:
            row["val/loss"], _ = self.validate(trainer, pl_module, self.plan.size.curve_batches, bf16=False)
        self.pending.append((step - 1, row))
        if len(self.pending) >= _FLUSH_EVERY or last:
            self.flush()
        if last:
            if self.options.keep:
                trainer.save_checkpoint(self.folder / "checkpoints" / "last.ckpt")
            self.finish(trainer, "finished", pl_module)
            return
        out_of_time = time.time() >= self.options.deadline
        orphan = self.options.parent is not None and os.getppid() != self.options.parent
        every = self.plan.size.checkpoint_every
        if out_of_time or orphan or (every and step % every == 0):
            self.flush()
            trainer.save_checkpoint(self.folder / "checkpoints" / "last.ckpt")
        trainer.should_stop = trainer.should_stop or out_of_time or orphan

    def flush(self) -> None:
        """Write what is pending; this waits for the device.

        Raises:
            Diverged: a loss is not finite.
        """
        diverged = False
        for step, row in self.pending:
            written = {name: float(value) for name, value in row.items()}
            diverged |= not all(map(math.isfinite, written.values()))
            self.csv.log_metrics(written, step)
        self.csv.save()
        self.pending = []
        if diverged:
            raise Diverged

    def validate(
        self, trainer: Trainer, pl_module: Any, batches: int, *, bf16: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the mean held-out loss in the arm's forward and, if asked, of the same weights in a BF16 forward."""
        plugin: Any = trainer.precision_plugin
        own, high = [], []
        pl_module.eval()
        with torch.no_grad():
            for batch in itertools.islice(self.data.validation(), batches):
                batch = {name: value.to(pl_module.device) for name, value in batch.items()}
                with plugin.forward_context():
                    own.append(pl_module.losses(batch, load_balance=False)[0].double())
                    if bf16:
                        with _bf16_forward(plugin.context):
                            high.append(pl_module.losses(batch, load_balance=False)[0].double())
        pl_module.train()
        return torch.stack(own).mean(), torch.stack(high).mean() if bf16 else None

    def finish(self, trainer: Trainer, status: str, pl_module: Any = None) -> None:
        """Write the result, and remove what is not needed any more."""
        size = self.plan.size
        result: dict[str, Any] = {
            "status": status,
            "arm": self.arm.name,
            "seed": self.seed,
            "identity": self.identity,
            "steps": trainer.global_step,
            "tokens": trainer.global_step * size.tokens_per_step,
            "seconds": round(self._elapsed(), 1),
            "processes": self.starts,
            "hardware": hardware("cuda" if torch.cuda.is_available() else "cpu"),
            "versions": {
                "torch": torch.__version__,
                "lightning": lightning.__version__,
                "python": platform.python_version(),
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if pl_module is not None:
            own, high = self.validate(trainer, pl_module, size.val_batches, bf16=True)
            report: Any = trainer.precision_plugin.report  # pyright: ignore[reportAttributeAccessIssue]
            result |= {
                "val_loss": float(own),
                "val_loss_bf16": None if high is None else float(high),
                "parameters": sum(p.numel() for p in pl_module.parameters()),
                "layers": report.summary() if report else None,
            }
        write_json(self.folder / "result.json", result)
        self.status = status
        if status == "finished" and not self.options.keep:
            for path in (self.folder / "checkpoints").glob("*.ckpt"):
                path.unlink()

    def _elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.clock

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of training and the number of processes so far."""
        return {"seconds": self._elapsed(), "starts": self.starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them up again."""
        self.seconds, self.starts = float(state_dict["seconds"]), int(state_dict["starts"])


@contextlib.contextmanager
def _bf16_forward(context: Any) -> Iterator[None]:
    before, context.forward_high_precision = context.forward_high_precision, True
    try:
        yield
    finally:
        context.forward_high_precision = before


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a file's lock, which the system gives back however the process ends; False if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _hash(tensors: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same_identity(folder: Path, stored: Mapping[str, Any], identity: str) -> None:
    """Raise a `UserError` unless what is in a run's folder is of the same data and settings."""
    if stored.get("identity") != identity:
        raise UserError(
            f"{folder} holds a run of other data or settings (model, schedule or recipe have changed since). Give a "
            "fresh --out, or delete that folder."
        )


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what is in a JSON file; ``None`` without one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole or not there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)

"""`NumericsMonitor`: how well each operand of each layer survives its quantizer, logged every so many steps."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.nn.function import COMPILES
from lightning_nvfp4.nn.observer import SUMS, Observer
from lightning_nvfp4.recipe import OPERANDS

PREFIX = "numerics"


class NumericsMonitor(Callback):
    """Log SQNR, saturated and flushed-to-zero share, and amax of every quantized operand, to every logger.

    Metrics are named ``numerics/<path>/<operand>/<what>``; an operand is one of `recipe.OPERANDS`, and what is

    - ``sqnr``: 10 log10(sum x^2 / sum (x - dequantized)^2) in dB, x being the operand that the layer was given and the
      rest its own quantizer, seeds included; backward operands that a recipe takes from what the forward saw are
      compared with the original as well; left out where it is no number: operands of zeros alone, or without loss;
    - ``saturated``, ``flushed``: shares of the elements that are not zero which were cut to the largest value of their
      block, or became zero;
    - ``amax``: the largest magnitude.

    The first micro-batch of an observed step counts, all ranks together. Training is the same, bit for bit, with and
    without it; only a step that is traced by torch.compile (torch 2.13 on) runs in eager mode while it is observed.

    Args:
        every_n_steps: observed are the steps that it divides, step 0 included.
        paths: shell-style patterns of layers to look at; all without it.

    Raises:
        UserError: a number below 1; no block-scaled precision; no layer of that name.
    """

    def __init__(self, every_n_steps: int = 100, paths: Sequence[str] = ()) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise UserError(f"NumericsMonitor.every_n_steps = {every_n_steps!r} must be a whole number of at least 1.")
        self.every_n_steps = every_n_steps
        self.patterns = (paths,) if isinstance(paths, str) else tuple(paths)
        self._step = -1
        self._names: dict[int, str] = {}
        self._eager = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the layers their names."""
        plugin: Any = trainer.precision_plugin
        report = getattr(plugin, "report", None)
        if report is None:
            raise UserError(
                f"NumericsMonitor needs a block-scaled precision, but the Trainer has precision={trainer.precision!r}: "
                "use 'nvfp4-hybrid' or another preset, or remove the callback."
            )
        names: dict[int, str] = {}
        for number, decision in enumerate(report.decisions):
            parts = [decision.path]
            if decision.kind == "experts":
                module: Any = pl_module.get_submodule(decision.path)
                up = "gate_up_proj" if module.has_gate else "up_proj"
                parts = [f"{decision.path}.{up}", f"{decision.path}.down_proj"]
            if decision.gemm is not None:
                names |= {2 * number + i: name for i, name in enumerate(parts)}
        wanted = {
            index: name
            for index, name in names.items()
            if not self.patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        }
        if names and not wanted:
            raise UserError(
                f"NumericsMonitor.paths = {list(self.patterns)} match none of the {len(names)} converted layers, "
                f"such as {next(iter(names.values()))!r}: mend the pattern."
            )
        self._names, self._step = wanted, -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Observe the first micro-batch of a step whose turn it is."""
        step = trainer.global_step
        if step % self.every_n_steps or step == self._step or not self._names:
            return
        self._step = step
        plugin: Any = trainer.precision_plugin
        plugin.context.observer = Observer(self._names.__contains__)
        if COMPILES and any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in pl_module.modules()):
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was observed."""
        plugin: Any = trainer.precision_plugin
        observer: Observer | None = plugin.context.observer
        if observer is None:
            return
        self._stop(trainer)
        metrics = self._metrics(trainer, pl_module, observer)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=self._step)

    def _metrics(self, trainer: Trainer, pl_module: LightningModule, observer: Observer) -> dict[str, float]:
        """Return the metrics of all ranks: every rank sends a table of one shape, whatever its layers met."""
        keys = [(index, operand) for index in self._names for operand in OPERANDS]
        nothing = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=pl_module.device)
        table = torch.stack([observer.sums.get(key, nothing) for key in keys])
        seen = torch.tensor([float(key in observer.sums) for key in keys], device=pl_module.device)
        if trainer.world_size > 1:
            sums, amax = table[:, :-1].contiguous(), torch.stack([table[:, -1], seen.double()], dim=1)
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
            amax = trainer.strategy.reduce(amax, reduce_op="max")
            table, seen = torch.cat([sums, amax[:, :1]], dim=1), amax[:, 1]
        metrics: dict[str, float] = {}
        signal, noise, saturated, flushed, nonzero, amax = table.T
        columns = {
            "sqnr": 10 * torch.log10(signal / noise),
            "saturated": saturated / nonzero.clamp(min=1),
            "flushed": flushed / nonzero.clamp(min=1),
            "amax": amax,
        }
        values = torch.stack([*columns.values(), seen.double()]).tolist()  # one wait for the device
        for (index, operand), *numbers, there in zip(keys, *values, strict=True):
            if there:
                for what, number in zip(columns, numbers, strict=True):
                    if what != "sqnr" or math.isfinite(number):
                        metrics[f"{PREFIX}/{self._names[index]}/{operand}/{what}"] = number
        return metrics

    def _stop(self, trainer: Trainer) -> None:
        context: Any = getattr(trainer.precision_plugin, "context", None)
        if context is not None:
            context.observer = None
        self._eager.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the layers alone."""
        self._stop(trainer)

"""The Lightning and Fabric precision plugin: converts on start, autocasts, seeds each micro-batch, restores at the end.

Nothing numeric is in here; the numerics are `lightning_nvfp4.recipe` and `lightning_nvfp4.nn`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins.precision.amp import MixedPrecision as TrainerMixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_nvfp4 import capability
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.nn.autocast import attention_of_autocast, bf16_autocast
from lightning_nvfp4.nn.context import NumericsContext
from lightning_nvfp4.nn.convert import ConversionReport, convert, restore
from lightning_nvfp4.ops import self_test
from lightning_nvfp4.ops.te import known_answer
from lightning_nvfp4.recipe import load_recipe


class BlockScaledMixin:
    """What the Trainer's and Fabric's plugin have in common; the base class is a ``MixedPrecision`` of either."""

    def __init__(
        self,
        preset: str = "nvfp4-hybrid",
        overrides: dict[str, Any] | None = None,
        backend: str = "auto",
    ) -> None:
        """Check the choice at construction.

        Args:
            preset: ``nvfp4-hybrid``, ``nvfp4``, ``mxfp8``, ``fp8`` or ``bf16-gemm``.
            overrides: nested fields of the preset to change, see `lightning_nvfp4.recipe.load_recipe`.
            backend: ``auto``, ``reference``, ``triton`` or ``te``.

        Raises:
            UserError: an unknown preset, field or backend, or a backend that cannot run here.
        """
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[call-arg]
        self.recipe = load_recipe(preset, overrides)
        capability.choose(backend, self.recipe)
        self.precision: Any = preset
        self.arguments: dict[str, Any] = {"preset": preset, "overrides": overrides, "backend": backend}
        self._conversions: list[tuple[weakref.ref[nn.Module], ConversionReport]] = []  # Fabric may set up several
        self._step = 0
        self._micro_batch = 0

    @property
    def report(self) -> ConversionReport | None:
        """What the last conversion did, while its module is converted."""
        return self._conversions[-1][1] if self._conversions else None

    @property
    def context(self) -> NumericsContext | None:
        """The state of the converted layers, while a module is converted."""
        return self.report.context if self.report else None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module` in place and return it."""
        report = convert(module, self.recipe, backend=self.arguments["backend"], device=self._target(module))
        for decision in report.converted:
            for name, parameter in module.get_submodule(decision.path).named_parameters(recurse=False):
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    restore(module)
                    raise UserError(
                        f"{decision.path}.{name} is {parameter.dtype}: training in {self.precision!r} needs FP32 "
                        "master weights. Call model.float() before fit (from_pretrained keeps the checkpoint's dtype)."
                    )
        if torch.cuda.is_available() and report.converted:
            device = torch.device("cuda", torch.cuda.current_device())
            self_test.require(device)
            if report.backend == "te":
                gemms = {d.gemm for d in report.converted if d.gemm and d.path not in report.emulated}
                known_answer.require(frozenset(gemms), device)
        parts = {id(part) for part in module.modules()}
        others = [pair for pair in self._conversions if (other := pair[0]()) is not None and id(other) not in parts]
        self._conversions = [*others, (weakref.ref(module), report)]
        rank_zero_info(report.summary())
        return module

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Run under BF16 autocast on the device where the module lives."""
        with bf16_autocast(self._device_type()) if self._converted() else self._stock_autocast():
            yield

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run backward so that recomputed layers repeat what the forward did."""
        with attention_of_autocast(self._device_type()) if self._converted() else nullcontext():
            super().backward(*args, **kwargs)  # type: ignore[misc]

    def _converted(self) -> bool:
        return self.report is not None and bool(self.report.converted)

    def _stock_autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type(), dtype=torch.bfloat16, cache_enabled=False)

    def _device_type(self) -> str:
        module = self._module()
        parameter = next(module.parameters(), None) if module else None
        return parameter.device.type if parameter is not None else self.device  # type: ignore[attr-defined]

    def _target(self, module: nn.Module) -> str | None:
        """Return the type of the device that `module` will run on, where that is known."""
        return None

    def teardown(self) -> None:
        """Give every module back as it was."""
        for reference, _ in self._conversions:
            if (module := reference()) is not None:
                restore(module)
        self._conversions = []
        super().teardown()  # type: ignore[misc]

    def _module(self) -> nn.Module | None:
        return self._conversions[-1][0]() if self._conversions else None

    def _begin_micro_batch(self, rank: int) -> None:
        self._seed(rank)
        self._micro_batch += 1

    def _seed(self, rank: int) -> None:
        run_seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        for number, (reference, report) in enumerate(self._conversions):
            module = reference()
            parameter = None if module is None else next(module.parameters(), None)
            device = None if parameter is None else parameter.device
            report.context.begin(run_seed, rank, self._step, self._micro_batch, number, device)

    def _next_step(self) -> None:
        self._step += 1
        self._micro_batch = 0


class TrainerPart(BlockScaledMixin):
    """Where the Trainer tells about steps: its ``global_step``, so that a resumed run draws the same bits."""

    def _target(self, module: nn.Module) -> str | None:
        trainer = getattr(module, "_trainer", None)
        return None if trainer is None else trainer.strategy.root_device.type

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Seed the micro-batch, then run its forward under autocast."""
        module: Any = self._module()
        rank = 0
        if module is not None and getattr(module, "_trainer", None) is not None:
            rank = module.trainer.global_rank
            if self._step != module.trainer.global_step:
                self._step, self._micro_batch = module.trainer.global_step, 0
        self._begin_micro_batch(rank)
        with self.forward_context():  # type: ignore[attr-defined]
            yield

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Step; in manual optimization the next forward of the same batch draws other bits."""
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        self._next_step()
        if not getattr(model, "automatic_optimization", True):
            self._begin_micro_batch(model.trainer.global_rank)
        return result


class BlockScaledPrecision(TrainerPart, TrainerMixedPrecision):
    """Train in a block-scaled preset: ``Trainer(plugins=[BlockScaledPrecision("nvfp4-hybrid")])``.

    Given to Fabric, or to the ``pytorch_lightning`` package, it becomes the plugin of that class tree.
    """


class FabricBlockScaledPrecision(BlockScaledMixin, FabricMixedPrecision):
    """The plugin that Fabric uses; made from a precision name or a `BlockScaledPrecision`.

    Its step counter (part of the stochastic-rounding seeds) is in `state_dict`: save and load it to replay a run.
    """

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Seed the micro-batch, then run under autocast; all forwards up to a backward belong to one."""
        if torch.is_grad_enabled():
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            self._seed(torch.distributed.get_rank() if distributed else 0)
        with super().forward_context():
            yield

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run backward; the next forward draws other bits."""
        super().backward(*args, **kwargs)
        self._micro_batch += 1

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step and move on to the next step's seeds."""
        result = super().optimizer_step(optimizer, **kwargs)
        self._next_step()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore the step counter."""
        self._step, self._micro_batch = int(state_dict["step"]), 0

"""Optimizer and learning rate: AdamW with selective weight decay, and a schedule that is a pure function of the step.

Both are described by plain dataclasses so that a YAML file, a checkpoint and Python all spell them alike. What the
configuration says wins over what a checkpoint says: continuing a checkpoint under another schedule (the decay stage)
keeps the optimizer's moments and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from lightning_nvfp4.errors import UserError, unknown

ScheduleKind = Literal["wsd", "linear", "cosine", "constant"]
DecayShape = Literal["sqrt", "linear"]
Config = TypeVar("Config")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. `lr` is the peak rate, which the schedule multiplies; `weight_decay` is decoupled."""

    lr: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError(f"optimizer.lr is {self.lr}: it must be a positive number.")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"optimizer.weight_decay is {self.weight_decay}: it must be a number, not negative.")
        if not 0 < self.eps < math.inf:
            raise UserError(f"optimizer.eps is {self.eps}: it must be a positive number.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas is {self.betas}: it must be two numbers in [0, 1).")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate multiplier as a function of the optimizer step (counted from 0 over the whole life of the run).

    Every kind rises linearly over the first `warmup_steps` steps. Then
    `constant` stays at 1;
    `wsd` stays at 1 until `decay_start` and falls to `min_ratio` over `decay_steps`, along `1 - sqrt(progress)`
    or, with `decay_shape: linear`, a straight line; without `decay_start` it never falls (the stable stage);
    `linear` and `cosine` fall from `decay_start` (default: the end of warm-up) over `decay_steps` (default: up to the
    trainer's `max_steps`). After the decay every kind stays at `min_ratio`.
    """

    kind: ScheduleKind = "wsd"
    warmup_steps: int = 0
    decay_start: int | None = None
    decay_steps: int | None = None
    min_ratio: float = 0.0
    decay_shape: DecayShape = "sqrt"

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise unknown("schedule.kind", self.kind, get_args(ScheduleKind))
        if self.decay_shape not in get_args(DecayShape):
            raise unknown("schedule.decay_shape", self.decay_shape, get_args(DecayShape))
        for name in ("warmup_steps", "decay_start", "decay_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"schedule.{name} is {value}: it must not be negative.")
        if not 0 <= self.min_ratio <= 1:
            raise UserError(f"schedule.min_ratio is {self.min_ratio}: it must lie in [0, 1].")
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            raise UserError(
                f"schedule.decay_start is {self.decay_start}, before the end of warm-up "
                f"(schedule.warmup_steps = {self.warmup_steps}): start the decay later or shorten the warm-up."
            )
        if self.kind == "wsd" and (self.decay_start is None) != (self.decay_steps is None):
            raise UserError(
                f"schedule.decay_start is {self.decay_start} and schedule.decay_steps is {self.decay_steps}: "
                "a wsd schedule needs both to decay, or neither to stay stable."
            )


def as_config(cls: type[Config], value: Config | dict[str, Any], name: str) -> Config:
    """Return `value` as a `cls`; a dict (a checkpoint's hyperparameters) may hold only the dataclass's fields."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        raise UserError(f"{name} is a {type(value).__name__}: give a {cls.__name__} or a mapping of its fields.")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in value:
        if key not in known:
            raise unknown(f"{name} field", key, known)
    return cls(**value)


def schedule_ratio(config: ScheduleConfig, max_steps: int | None = None) -> Callable[[int], float]:
    """Return the multiplier as a function of the step.

    Args:
        config: the schedule.
        max_steps: the trainer's last step, used only where `decay_steps` is left out.
    """
    if config.kind == "constant" or (config.kind == "wsd" and config.decay_start is None):
        start, length = math.inf, 0
    else:
        start = config.warmup_steps if config.decay_start is None else config.decay_start
        if config.decay_steps is None:
            if max_steps is None or max_steps <= 0:
                raise UserError(
                    f"schedule.decay_steps is not set for the {config.kind} schedule and the trainer has no "
                    "max_steps: set one of the two."
                )
            length = max(max_steps - start, 0)
        else:
            length = config.decay_steps

    def ratio(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if step < start:
            return 1.0
        progress = min((step - start) / length, 1.0) if length else 1.0
        if config.kind == "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
        elif config.kind == "wsd" and config.decay_shape == "sqrt":
            remaining = 1 - math.sqrt(progress)
        else:
            remaining = 1 - progress
        return config.min_ratio + (1 - config.min_ratio) * remaining

    return ratio


class StepSchedule(LambdaLR):
    """`LambdaLR` over the optimizer step that takes only the step from a checkpoint.

    The stock class also restores the base rates, and the optimizer's state restores the rate itself; a run continued
    under another configuration would then follow the old one.
    """

    def __init__(self, optimizer: AdamW, ratio: Callable[[int], float]) -> None:
        super().__init__(optimizer, ratio)
        self._groups = [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """The number of optimizer steps taken; nothing else is needed."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the step, then write the configuration's hyperparameters and that step's rate into the optimizer."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        rates = [base * ratio(self.last_epoch) for base, ratio in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, own, rate in zip(self.optimizer.param_groups, self._groups, rates, strict=True):
            group.update(own, lr=rate)
        self._last_lr = list(rates)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    Matrices decay: linear, expert, router and convolution weights of two or more dims. Embeddings do not (a row's
    decay would depend on how often its token occurs), nor does an output layer tied to them, nor norms, nor biases,
    per-expert (E, out) biases included. Sharded parameters are split by mesh as well, since one fused or foreach call
    accepts one mesh.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[bool, int], list[nn.Parameter]] = defaultdict(list)
    meshes: list[Any] = [None]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2 and id(parameter) not in embeddings and not name.endswith("bias")
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh not in meshes:
            meshes.append(mesh)
        groups[decays, meshes.index(mesh)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(groups.items(), key=lambda item: (not item[0][0], item[0][1]))
    ]


def build_adamw(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over `model`, fused where every parameter's device has the fused kernel."""
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise UserError("The model has no trainable parameter: unfreeze some, or do not fit it.")
    fused_devices = _get_fused_kernels_supported_devices()
    fused = all(parameter.device.type in fused_devices for group in groups for parameter in group["params"])
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    # Fused AdamW offers to unscale FP16 gradients itself, for which Lightning refuses to clip, in BF16 too. Declined, a
    # gradient scaler unscales before the step as it does for every other optimizer.
    optimizer._step_supports_amp_scaling = False
    return optimizer

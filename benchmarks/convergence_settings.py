"""What `convergence.yaml` says, checked: the model and its schedule, and the arms."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_nvfp4 import PrecisionSchedule, load_recipe
from lightning_nvfp4.commands.yaml_files import read_mapping
from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.optim import OptimizerConfig, ScheduleConfig

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("main", "ablation", "operand", "decay")


@dataclass(frozen=True)
class Size:
    """One model, its data and its schedule; the fields are explained in `convergence.yaml`."""

    recipe: str
    sequence_length: int
    batch_size: int
    tokens: int
    noise_tokens: int
    optimizer: Mapping[str, Any]
    warmup: float
    decay: float
    val_batches: int
    curve_batches: int
    curve_points: int
    checkpoint_every: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch."""
        return self.sequence_length * self.batch_size

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return self.tokens // self.tokens_per_step

    @property
    def decay_start(self) -> int:
        """The first step of the decay."""
        return self.steps - round(self.decay * self.steps)

    def schedule(self) -> ScheduleConfig:
        """Return the learning rate's schedule."""
        start = self.decay_start
        return ScheduleConfig("wsd", round(self.warmup * self.steps), start, self.steps - start)

    def model(self, vocab_size: int) -> dict[str, Any]:
        """Return the model's configuration with the vocabulary of the token files."""
        section = read_mapping(ROOT / self.recipe)["model"]["init_args"]["model"]
        own = {k: section[v[3:-1]] if isinstance(v, str) and v.startswith("${.") else v for k, v in section.items()}
        return {**own, "vocab_size": vocab_size}


@dataclass(frozen=True)
class Arm:
    """One way to do the GEMMs; see `convergence.yaml`."""

    name: str
    precision: str
    overrides: Mapping[str, Any] | None = None
    schedule: Mapping[str, Any] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    group: str = "main"
    limits: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        load_recipe(self.precision, self.overrides)
        if self.schedule is not None:
            PrecisionSchedule(**self.schedule)
        if self.group not in GROUPS:
            raise unknown(f"arm {self.name}: group", self.group, GROUPS)

    @property
    def folder(self) -> str:
        """A name for files."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Plan:
    """Everything that the driver runs."""

    size: Size
    arms: tuple[Arm, ...]
    baseline: str
    hybrid: str

    def arm(self, name: str) -> Arm:
        """Return the arm of a name, or of its folder's."""
        for arm in self.arms:
            if name in (arm.name, arm.folder):
                return arm
        raise unknown("arm", name, [arm.folder for arm in self.arms])

    def identity(self, arm: Arm, seed: int, about: Mapping[str, Any]) -> str:
        """Return a hash of all that decides the numbers of a run."""
        size = dataclasses.asdict(self.size)
        size.pop("checkpoint_every")
        size.pop("noise_tokens")
        recipe = repr(load_recipe(arm.precision, arm.overrides))
        schedule = {"forward_at": 0.82, **arm.schedule} if arm.schedule is not None else None
        parts = [size, self.size.model(about["vocab_size"]), recipe, schedule, seed, about]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def read_plan(path: Path, model: str, noise: bool = False, tokens: int | None = None) -> Plan:
    """Read the arms and the model from a YAML file.

    Args:
        path: in the form of `convergence.yaml`.
        model: a key of its `models`.
        noise: two seeds of the baseline alone, on `noise_tokens`.
        tokens: another budget than the file's.

    Raises:
        UserError: an unknown key or model, or a budget below a few steps.
    """
    section = read_mapping(path)
    if model not in section.get("models", {}):
        raise unknown("model", model, section.get("models", {}))
    size = _made(Size, section["models"][model], f"{path}: models.{model}")
    OptimizerConfig(**size.optimizer)
    size = dataclasses.replace(size, tokens=tokens or (size.noise_tokens if noise else size.tokens))
    if size.steps < 8:
        raise UserError(f"{size.tokens} tokens are {size.steps} steps of {size.tokens_per_step}: give at least 8.")
    arms = []
    for name, fields in section.get("arms", {}).items():
        arm = _made(Arm, {"name": name, **fields}, f"{path}: arms.{name}")
        arms.append(dataclasses.replace(arm, seeds=tuple(arm.seeds)))
    plan = Plan(size, tuple(arms), section["baseline"], section["hybrid"])
    baseline = plan.arm(plan.baseline)
    if noise:
        plan = dataclasses.replace(plan, arms=(dataclasses.replace(baseline, seeds=baseline.seeds[:2]),))
    return plan


def _made(kind: Any, fields: Mapping[str, Any], where: str) -> Any:
    names = [f.name for f in dataclasses.fields(kind)]
    for key in fields:
        if key not in names:
            raise unknown(f"{where}: field", key, names)
    try:
        return kind(**fields)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except TypeError as error:
        raise UserError(f"{where}: {error}: give it.") from None

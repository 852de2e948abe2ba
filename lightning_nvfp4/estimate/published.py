"""Published end-to-end gains beside the model's: a check that nothing was fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.estimate.architecture import read_architecture
from lightning_nvfp4.estimate.hardware import Hardware
from lightning_nvfp4.estimate.rollout import rl_step
from lightning_nvfp4.estimate.settings import load, number
from lightning_nvfp4.estimate.stacks import STACKS
from lightning_nvfp4.estimate.step_model import StepModel
from lightning_nvfp4.estimate.workload import Rollout, Training, load_training
from lightning_nvfp4.recipe import Recipe, load_recipe
from lightning_nvfp4.selection import select

_PHASES = ("step", "training", "rollout")


@dataclass(frozen=True)
class Figures:
    """What was published: the gain (time of the baseline over the candidate's, minus 1), tokens/s of each GPU, or both.

    What was not is NaN.
    """

    gain: float = number("the published gain", default=math.nan, least=-1)
    baseline_tokens: float = number("tokens/s of each GPU", default=math.nan)
    candidate_tokens: float = number("tokens/s of each GPU", default=math.nan)


@dataclass(frozen=True)
class Case:
    """One published comparison: what ran, on what, and what the source leaves open."""

    name: str
    source: str
    hardware: str
    model: str
    stack: str
    training: Training
    baseline: str
    candidate: str
    published: Figures
    assumed: str
    phase: str = "step"
    rollout: Rollout | None = field(default=None)


@dataclass(frozen=True)
class Outcome:
    """A case and what the model says of it."""

    case: Case
    gain: float
    baseline_tokens: float
    candidate_tokens: float


def validate(
    content: Mapping[str, Any],
    where: str,
    build: Callable[[dict[str, Any]], nn.Module],
    find_hardware: Callable[[str], Hardware],
) -> list[Outcome]:
    """Return the model's figure for every published one.

    Args:
        content: mapping with ``models``, ``precisions`` and ``cases``; see ``recipes/estimate/published.yaml``.
        where: its file, for messages.
        build: a model on the meta device from its configuration's fields.
        find_hardware: hardware by the name of its file.

    Raises:
        UserError: a case that names what is not there, or with wrong values.
    """
    for key in ("models", "precisions", "cases"):
        if not content.get(key):
            raise UserError(f"{where}: {key} is missing: add it, as in recipes/estimate/published.yaml.")
    recipes = {name: load_recipe(p["preset"], p.get("overrides")) for name, p in content["precisions"].items()}
    model = cache(lambda name: build(dict(content["models"][name])))
    outcomes = []
    for index, raw in enumerate(content["cases"]):
        case = _case(raw, where, f"cases[{index}]")
        for kind, name, known in (
            ("model", case.model, content["models"]),
            ("precision", case.baseline, recipes),
            ("precision", case.candidate, recipes),
            ("stack", case.stack, STACKS),
            ("phase", case.phase, _PHASES),
        ):
            if name not in known:
                raise unknown(f"{where}: cases[{index}]: {kind}", name, known)
        hardware = find_hardware(case.hardware)
        seconds = [
            _seconds(case, model(case.model), recipes[name], hardware) for name in (case.baseline, case.candidate)
        ]
        tokens = case.training.tokens * case.training.micro_batches * case.training.replicas / case.training.gpus
        outcomes.append(Outcome(case, seconds[0] / seconds[1] - 1, tokens / seconds[0], tokens / seconds[1]))
    return outcomes


def _case(raw: Any, where: str, path: str) -> Case:
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: {path} = {raw!r} must be a mapping of fields.")
    rollout = raw.get("rollout")
    case = load(Case, {key: value for key, value in raw.items() if key != "rollout"}, where, path)
    load_training(raw["training"], where, f"{path}.training")
    loaded = load(Rollout, rollout, where, f"{path}.rollout") if rollout is not None else None
    return Case(**{**vars(case), "rollout": loaded})


def _seconds(case: Case, model: nn.Module, recipe: Recipe, hardware: Hardware) -> float:
    architecture = read_architecture(model, select(model, recipe))
    step_model = StepModel(architecture, hardware, STACKS[case.stack])
    if case.rollout is None:
        return step_model.step(case.training).total
    step = rl_step(step_model, case.training, case.rollout)
    return {"step": step.total, "training": step.training.total, "rollout": step.rollout}[case.phase]

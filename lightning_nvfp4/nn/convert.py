"""Conversion of a model in place, and back: classes change, Parameter objects and state-dict keys do not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from lightning_nvfp4 import capability
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.nn.context import LayerNumerics, NumericsContext
from lightning_nvfp4.nn.experts import EXPERTS_IMPLEMENTATION
from lightning_nvfp4.nn.linear import BlockScaledLinear, ConvertedModule, Fp32Router, converted_class
from lightning_nvfp4.ops import kernels
from lightning_nvfp4.ops.te import plan as te_plan
from lightning_nvfp4.recipe import GemmRecipe, Recipe, load_recipe
from lightning_nvfp4.selection import Decision, flop_shares, select

_NUMERICS, _CLASS, _PREVIOUS = "block_scaled_numerics", "_block_scaled_class", "_block_scaled_previous"


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        recipe: the numerics.
        choice: where the quantized GEMMs run, whether at native speed, and why.
        decisions: one for every linear, experts and router module, in the model's order.
        context: the state that the converted layers share.
        emulated: path -> reason of converted layers that the chosen backend cannot run, and that are emulated.
    """

    recipe: Recipe
    choice: capability.Choice
    decisions: tuple[Decision, ...]
    context: NumericsContext
    emulated: Mapping[str, str]

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self.choice.backend

    @property
    def native(self) -> bool:
        """Whether every converted layer runs at native speed."""
        return self.choice.native and not self.emulated

    @property
    def converted(self) -> tuple[Decision, ...]:
        """The layers whose GEMMs run in the recipe's numerics."""
        return tuple(d for d in self.decisions if d.gemm is not None)

    @property
    def plan_hash(self) -> str:
        """The first 16 hex digits of the SHA-256 of every layer's path, shape and numerics: equal where plans are."""
        plan = [(d.path, d.kind, d.shape, d.use, repr(d.gemm)) for d in self.decisions]
        return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]

    def summary(self) -> str:
        """Return one line: preset, layers converted and kept, forward formats by share of GEMM FLOPs, backend."""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in flop_shares(self.decisions).items())
        kept = len(self.decisions) - len(self.converted)
        line = (
            f"{self.recipe.name}: {len(self.converted)} layers converted, {kept} kept; "
            f"forward GEMM FLOPs: {shares or 'none'}; backend {self.backend} ({self.choice.reason})"
        )
        if self.emulated:
            path, reason = next(iter(self.emulated.items()))
            line += f"; {len(self.emulated)} layers emulated, as {path}: {reason}"
        return line


def convert(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    overrides: Mapping[str, Any] | None = None,
    backend: str = "auto",
    device: str | None = None,
) -> ConversionReport:
    """Convert the selected layers of `model` in place; converting twice equals converting once.

    Args:
        model: any module, on any device, meta included. Parameters keep their dtype; FP32 is expected for training.
        recipe: a preset's name or a `Recipe`.
        overrides: nested fields of the preset to change; see `load_recipe`.
        backend: ``auto``, ``reference``, ``triton`` or ``te``.
        device: type of the device that the model will run on, where that is known already: ``cpu`` or ``cuda``.

    Raises:
        UserError: an unknown preset, field or backend, a backend that cannot run here, or no layer to convert.
    """
    recipe = load_recipe(recipe, overrides) if isinstance(recipe, str) else recipe
    choice = capability.choose(backend, recipe, capability.this_machine(device))
    kernels()
    restore(model)
    decisions = tuple(select(model, recipe))
    context = NumericsContext(num_layers=2 * len(decisions))
    emulation = "auto" if backend == "te" else backend
    emulated = _emulated(decisions, backend) if choice.backend == "te" else {}
    report = ConversionReport(recipe, choice, decisions, context, emulated)
    if not report.converted:
        if recipe.uses():
            raise _nothing_converted(model, recipe, decisions)
        return report
    any_experts = any(d.kind == "experts" for d in report.converted)
    for index, decision in enumerate(decisions):
        module = model.get_submodule(decision.path)
        kept = decision.gemm is None
        gemm = decision.gemm or GemmRecipe()
        native = choice.backend == "te" and not kept and decision.path not in emulated
        layers = [LayerNumerics(gemm, context, 2 * index + i, emulation, kept, native) for i in range(2)]
        if decision.kind == "experts":
            # All experts of a model share one implementation name; a kept layer takes BF16 operands in it.
            if any_experts:
                _set_experts(module, (layers[0], layers[1]))
        elif decision.kind == "router":
            if any_experts:
                _set_class(module, Fp32Router)
        elif not kept or decision.plain:
            _set_class(module, BlockScaledLinear)
            module.__dict__[_NUMERICS] = layers[0]
    return report


def _emulated(decisions: tuple[Decision, ...], backend: str) -> dict[str, str]:
    """Return the converted layers that Transformer Engine cannot run, with the reason; an error if it was asked for."""
    found = {d.path: reason for d in decisions if d.gemm and (reason := _te_uncovered(d))}
    if found and backend == "te":
        path, reason = next(iter(found.items()))
        raise UserError(
            f"backend='te' cannot run {path}: {reason}. Keep the layer by a rule (match: {path!r}, use: keep), or use "
            "backend='auto', which emulates it."
        )
    return found


def _te_uncovered(decision: Decision) -> str | None:
    assert decision.gemm is not None
    return next((r for s in decision.weights if (r := te_plan.uncovered(decision.gemm, s))), None)


def restore(model: nn.Module) -> None:
    """Undo `convert`: every layer gets back the class, and the experts the implementation, that it had before."""
    for module in model.modules():
        module.__dict__.pop(_NUMERICS, None)
        classes: tuple[type[ConvertedModule], type] | None = module.__dict__.pop(_CLASS, None)
        if classes is not None:
            module.__class__ = _without(type(module), classes[1], converted_class(*classes))
        shared: _SharedConfig | None = module.__dict__.pop(_PREVIOUS, None)
        if shared is not None:
            shared.users -= 1
            if not shared.users:  # a converted part of a larger model leaves the choice to the rest
                config: Any = module.config
                config._experts_implementation = shared.previous


@contextmanager
def keeping_conversion(model: nn.Module) -> Iterator[None]:
    """Whatever is converted inside, leave `model` on exit as converted, or not, as it was."""
    names = (_NUMERICS, _CLASS, _PREVIOUS)
    before = [
        (module, type(module), {n: module.__dict__[n] for n in names if n in module.__dict__})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        restore(model)
        for module, kind, state in before:
            if state:
                module.__class__ = kind
                module.__dict__.update(state)
            if _PREVIOUS in state:
                state[_PREVIOUS].users += 1
                config: Any = module.config
                config._experts_implementation = EXPERTS_IMPLEMENTATION


def context_of(model: nn.Module) -> NumericsContext | None:
    """Return the state that the converted layers of `model` share, or ``None`` if nothing is converted."""
    for module in model.modules():
        numerics = module.__dict__.get(_NUMERICS)
        if numerics is not None:
            return (numerics[0] if isinstance(numerics, tuple) else numerics).context
    return None


def _set_class(module: nn.Module, mixin: type[ConvertedModule]) -> None:
    """Give `module` a class that adds `mixin` to its own; a wrapper's class (FSDP2) stays a base."""
    original = type(module)
    module.__dict__[_CLASS] = (mixin, original)
    module.__class__ = converted_class(mixin, original)


def _without(kind: type, original: type, ours: type) -> type:
    """Return the class `kind` with `original` in the place of `ours`, which others may have derived from since."""
    if kind is ours:
        return original
    if not issubclass(kind, ours):  # given back by others
        return nn.Linear if kind is BlockScaledLinear else kind
    bases = tuple(_without(base, original, ours) if issubclass(base, ours) else base for base in kind.__bases__)
    content = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, content)


class _SharedConfig:
    """The experts implementation that a configuration had, and how many converted modules read it."""

    def __init__(self, previous: str | None) -> None:
        self.previous, self.users = previous, 0


_CONFIGS: WeakValueDictionary[int, _SharedConfig] = WeakValueDictionary()


def _set_experts(module: nn.Module, layers: tuple[LayerNumerics, LayerNumerics]) -> None:
    config: Any = module.config
    shared = _CONFIGS.get(id(config))
    if shared is None or not shared.users:
        shared = _CONFIGS[id(config)] = _SharedConfig(config._experts_implementation)
    shared.users += 1
    # Kept on the module: anything put on the config would be saved with the model.
    module.__dict__[_PREVIOUS] = shared
    config._experts_implementation = EXPERTS_IMPLEMENTATION
    module.__dict__[_NUMERICS] = layers


def _nothing_converted(model: nn.Module, recipe: Recipe, decisions: tuple[Decision, ...]) -> UserError:
    reasons = Counter(decision.reason for decision in decisions)
    why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(5)) or "it has no linear layer"
    return UserError(
        f"precision {recipe.name!r} converted no layer of {type(model).__name__} ({why}). Change keep_first_blocks, "
        "keep_last_blocks or rules in the overrides, or train with precision='bf16-mixed'."
    )

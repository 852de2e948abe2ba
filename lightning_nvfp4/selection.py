"""Which layers of a model are quantized: one traversal, one decision with its reason for every candidate.

Order of the checks, first match wins: layers that are sensitive by their nature (router, embedding, output head),
blocks kept at the ends of the model, the recipe's path rules, the role of the layer (routed experts, MLP, other).
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.recipe import GemmRecipe, Recipe, Role

# arXiv:2509.25149 section 4: the first 2 and the last 8 of the 62 blocks of the 12B model stay in BF16.
_KEPT_FIRST, _KEPT_LAST, _PAPER_BLOCKS = 2, 8, 62

_ROUTER = re.compile(r"(^|\.)(gate|router|wg)$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|output_projection)$")
_STATE_SPACE = re.compile(r"(^|\.)(dt_proj|x_proj)$")
_MLP = re.compile(r"(^|\.)(mlp|feed_forward|ffn|fc1|fc2)(\.|$)")
_ADAPTER = re.compile(r"\.lora_[AB]\.\w+$")  # PEFT's names
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)$")  # by PEFT, under the name it replaces
_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


@dataclass(frozen=True)
class Decision:
    """What happens to one layer.

    Attributes:
        path: full name of the module.
        kind: ``linear``, ``experts`` (stacked 3D weights) or ``router``.
        shape: (N, K) of a linear's weight; (E, N, K) of the first GEMM of an experts module.
        flops: multiply-adds per token of its forward GEMMs (routed experts: of the experts a token visits).
        gemm: the numerics, or ``None`` where it stays in high precision.
        use: name of the numerics in the recipe, or ``keep``.
        reason: why.
        plain: a linear of which nothing but its forward is used.
        weights: shapes of the weights of its GEMMs, (N, K) or (E, N, K).
    """

    path: str
    kind: Literal["linear", "experts", "router"]
    shape: tuple[int, ...]
    flops: int
    gemm: GemmRecipe | None
    use: str
    reason: str
    plain: bool = False
    weights: tuple[tuple[int, ...], ...] = ()


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` is an experts module of transformers' experts interface (stacked 3D weights)."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def is_router(path: str, module: nn.Module) -> bool:
    """Return whether `module` computes routing logits of a mixture of experts."""
    name = type(module).__name__.lower()
    return (name.endswith("router") and hasattr(module, "weight")) or (
        isinstance(module, nn.Linear) and bool(_ROUTER.search(_WRAPPED.sub("", path)))
    )


def select(model: nn.Module, recipe: Recipe) -> list[Decision]:
    """Return the decision for every linear, experts and router module of `model`, in the model's order.

    Args:
        model: any module; parameters may be on the meta device.
        recipe: the numerics and the rules; see `lightning_nvfp4.recipe.Recipe`.
    """
    candidates = list(_candidates(model))
    has_experts = any(kind == "experts" or _EXPERT.search(path) for path, _, kind in candidates)
    has_blocks = any(_block(model, path) for path, _, _ in candidates)
    decisions = []
    for path, module, kind in candidates:
        use, reason = _decide(model, recipe, path, module, kind, has_experts, has_blocks)
        gemm = None if use == "keep" else recipe.gemms[use]
        plain = kind == "linear" and forwards_as_linear(module) and not _read_by_parent(model, path)
        shape, weights = _shape(module), _weights(module)
        decisions.append(Decision(path, kind, shape, _flops(model, path, module), gemm, use, reason, plain, weights))
    return decisions


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, Literal["linear", "experts", "router"]]]:
    for path, module in model.named_modules():
        lazy: Any = module
        if isinstance(lazy, LazyModuleMixin) and lazy.has_uninitialized_params():  # type: ignore[misc]
            raise UserError(
                f"{path or 'the model'} is a {type(module).__name__} whose sizes are not known: run a batch through "
                "the model, or give its sizes, before it is converted."
            )
        if is_experts(module):
            yield path, module, "experts"
        elif is_router(path, module):
            yield path, module, "router"
        elif isinstance(module, nn.Linear):
            yield path, module, "linear"


def _decide(
    model: nn.Module,
    recipe: Recipe,
    path: str,
    module: nn.Module,
    kind: str,
    has_experts: bool,
    has_blocks: bool,
) -> tuple[str, str]:
    if kind == "router":
        return "keep", "router: FP32 logits"
    if kind == "linear" and not forwards_as_linear(module):
        return "keep", f"{type(module).__name__} does not compute a plain linear map"
    if kind == "linear" and _read_by_parent(model, path):
        return "keep", "its weight is read without its forward"
    if _HEAD.search(_WRAPPED.sub("", path)):
        return "keep", "output head"
    for rule in recipe.rules:
        if fnmatch.fnmatchcase(path, rule.match):
            return rule.use, f"rule {rule.match!r}"
    if _ADAPTER.search(path):
        return "keep", "low-rank adapter"
    block = _block(model, path)
    if block is not None:
        index, depth = block
        first, last = kept_blocks(recipe, depth)
        if index < first:
            return "keep", f"one of the first {first} of {depth} blocks"
        if index >= depth - last:
            return "keep", f"one of the last {last} of {depth} blocks"
    role: Role = "linear"
    if kind == "experts" or _EXPERT.search(path):
        role = "experts"
    elif not has_experts and (_is_mlp(model, path) or not has_blocks):
        role = "mlp"
    if role not in recipe.roles:
        return "keep", f"the recipe has no role {role!r}"
    return recipe.roles[role], f"role {role}"


def forwards_as_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear whose forward is ``nn.Linear``'s own (or ours)."""
    forward = type(module).forward
    return forward is nn.Linear.forward or getattr(forward, "block_scaled", False)


def kept_blocks(recipe: Recipe, depth: int) -> tuple[int, int]:
    """Return how many blocks stay in high precision at the start and at the end of `depth` blocks."""
    first, last = recipe.keep_first_blocks, recipe.keep_last_blocks
    if first is None:
        first = round(depth * _KEPT_FIRST / _PAPER_BLOCKS)
    if last is None:
        last = min(max(1, round(depth * _KEPT_LAST / _PAPER_BLOCKS)), depth - 1)
    return first, last


def _is_mlp(model: nn.Module, path: str) -> bool:
    return bool(_MLP.search(path)) or "mlp" in type(_parent(model, path)).__name__.lower()


def _read_by_parent(model: nn.Module, path: str) -> bool:
    return isinstance(_parent(model, path), nn.MultiheadAttention) or bool(_STATE_SPACE.search(path))


def _parent(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


def _block(model: nn.Module, path: str) -> tuple[int, int] | None:
    """Return (index, depth) of the outermost `nn.ModuleList` entry that holds `path`."""
    parts = path.split(".")
    module = model
    for i, part in enumerate(parts[:-1]):
        module = module.get_submodule(part)
        if isinstance(module, nn.ModuleList) and parts[i + 1].isdigit():
            return int(parts[i + 1]), len(module)
    return None


def _shape(module: Any) -> tuple[int, ...]:
    if is_experts(module):
        up = getattr(module, "gate_up_proj" if module.has_gate else "up_proj")
        e, n, k = up.shape
        return (e, k, n) if module.is_transposed else (e, n, k)
    weight = module.weight
    return tuple(weight.shape) if hasattr(weight, "shape") else ()


def _weights(module: Any) -> tuple[tuple[int, ...], ...]:
    if not is_experts(module):
        return (_shape(module),)
    e, *down = module.down_proj.shape
    return _shape(module), (e, *(reversed(down) if module.is_transposed else down))


def _flops(model: nn.Module, path: str, module: Any) -> int:
    """Return multiply-adds of a token on average: an expert that is a module of its own sees a share of the tokens."""
    config = getattr(module, "config", None) or getattr(model, "config", None)
    visited = int(getattr(config, "num_experts_per_tok", 1) or 1)
    if is_experts(module):
        up, down = _shape(module), module.down_proj.shape
        return (up[1] * up[2] + down[1] * down[2]) * visited
    shape = _shape(module)
    whole = shape[0] * shape[1] if len(shape) == 2 else 0
    if found := _EXPERT.search(path):
        siblings = model.get_submodule(path[: found.end()].rstrip(".").rpartition(".")[0])
        return whole * visited // len(list(siblings.children()))
    return whole


def flop_shares(decisions: Iterable[Decision]) -> dict[str, float]:
    """Return the share of forward GEMM FLOPs by format (routers and heads included), largest first."""
    totals: Counter[str] = Counter()
    for decision in decisions:
        totals[decision.gemm.forward_name() if decision.gemm else "kept"] += decision.flops
    whole = sum(totals.values()) or 1
    return {name: flops / whole for name, flops in totals.most_common()}

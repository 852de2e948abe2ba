"""What a model consists of, for counting: its GEMMs with their recipes, sequence mixing, norms, activations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_nvfp4.recipe import OPERANDS, GemmRecipe
from lightning_nvfp4.selection import Decision

# Linears of one module that read the same tensor: a stack that fuses them quantizes it once.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True)
class Gemm:
    """The three GEMMs of one weight, or of the weights of a layer's routed experts.

    Attributes:
        path: the module, and for experts which of its weights.
        experts: number of weights N x K; 1 for a linear.
        visits: rows for each token, summed over the experts.
        n, k: shape of one weight.
        recipe: numerics, or ``None`` in BF16.
        input_id: equal for linears that read one tensor.
        routed: whether its rows are tokens sent to experts.
        head: whether it makes the logits.
        activation: what its input cost to make: 0 where it is no activation of an MLP, 1 plain, 2 gated.
    """

    path: str
    experts: int
    visits: float
    n: int
    k: int
    recipe: GemmRecipe | None
    input_id: str
    routed: bool = False
    head: bool = False
    activation: int = 0

    @property
    def parameters(self) -> int:
        """Numbers in its weights."""
        return self.experts * self.n * self.k

    @property
    def quantized(self) -> bool:
        """Whether any operand of its three GEMMs is."""
        return any(getattr(self.recipe, name, None) is not None for name in OPERANDS)

    @property
    def macs(self) -> float:
        """Multiply-adds of the forward for one token."""
        return self.visits * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """One attention layer: `heads` of `qk_dim` and `v_dim`; `kv_numbers` cached for a token; window or ``None``."""

    heads: int
    qk_dim: int
    v_dim: int
    kv_numbers: int
    window: int | None


@dataclass(frozen=True)
class StateSpace:
    """One Mamba-2 layer: inner width, state size, groups, and tokens of a chunk."""

    inner: int
    state: int
    groups: int
    chunk: int


@dataclass(frozen=True)
class Architecture:
    """A model as counts.

    Attributes:
        gemms: every linear, router and experts weight.
        attention, state_space: layers that mix tokens.
        norms: numbers normalized for a token, one entry a norm.
        hidden: width of the residual stream.
        vocabulary: number of logits.
        parameters: all parameters; `expert_parameters` of them belong to routed experts.
    """

    gemms: tuple[Gemm, ...]
    attention: tuple[Attention, ...]
    state_space: tuple[StateSpace, ...]
    norms: tuple[int, ...]
    hidden: int
    vocabulary: int
    parameters: int

    @property
    def expert_parameters(self) -> int:
        """Parameters of routed experts."""
        return sum(gemm.parameters for gemm in self.gemms if gemm.routed)


def read_architecture(model: nn.Module, decisions: Iterable[Decision]) -> Architecture:
    """Return the counts of a Hugging Face causal language model (on any device) under a selection plan."""
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    attention, state_space, norms = [], [], []
    for path, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith("Attention"):
            attention.append(_attention(module, config))
        elif "Mamba" in kind and hasattr(module, "ssm_state_size"):
            state_space.append(_state_space(module))
        elif "Norm" in kind and getattr(module, "weight", None) is not None:
            norms.append(_norm_numbers(path, module, config))
    return Architecture(
        gemms=tuple(gemm for decision in decisions for gemm in _gemms(model, decision)),
        attention=tuple(attention),
        state_space=tuple(state_space),
        norms=tuple(norms),
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _gemms(model: nn.Module, decision: Decision) -> list[Gemm]:
    path, recipe = decision.path, decision.gemm
    parent, _, name = path.rpartition(".")
    module: Any = model.get_submodule(path)
    if decision.kind == "experts":
        experts, n_up, k_up = decision.shape
        _, rows, columns = module.down_proj.shape
        n_down, k_down = (columns, rows) if module.is_transposed else (rows, columns)
        visits = decision.flops / (n_up * k_up + n_down * k_down)
        activation = 2 if module.has_gate else 1
        return [
            Gemm(f"{path}.up", experts, visits, n_up, k_up, recipe, f"{path}.up", routed=True),
            Gemm(f"{path}.down", experts, visits, n_down, k_down, recipe, f"{path}.down", True, activation=activation),
        ]
    if len(decision.shape) != 2:
        return []
    shared = next((group for group in _SAME_INPUT if name in group), (name,))
    n, k = decision.shape
    activation = 0
    if name == "down_proj":
        activation = 2 if hasattr(model.get_submodule(parent), "gate_proj") else 1
    return [
        Gemm(
            path,
            experts=1,
            visits=decision.flops / (n * k),
            n=n,
            k=k,
            recipe=recipe,
            input_id=f"{parent}.{shared[0]}",
            head=bool(re.search(r"(^|\.)lm_head$", path)),
            activation=activation,
        )
    ]


def _attention(module: Any, config: Any) -> Attention:
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(module, "head_dim", None) or getattr(config, "head_dim", 0) or config.hidden_size // heads)
    window = getattr(module, "sliding_window", None)
    if hasattr(module, "kv_lora_rank"):
        cached = int(module.kv_lora_rank + module.qk_rope_head_dim)
    else:
        cached = 2 * int(getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return Attention(
        heads,
        qk_dim=int(getattr(module, "qk_head_dim", head_dim)),
        v_dim=int(getattr(module, "v_head_dim", head_dim)),
        kv_numbers=cached,
        window=int(window) if window else None,
    )


def _state_space(module: Any) -> StateSpace:
    return StateSpace(
        int(module.intermediate_size),
        int(module.ssm_state_size),
        int(getattr(module, "n_groups", 1)),
        int(getattr(module, "chunk_size", 1)),
    )


def _norm_numbers(path: str, module: Any, config: Any) -> int:
    heads = {"q_norm": "num_attention_heads", "k_norm": "num_key_value_heads"}.get(path.rpartition(".")[2])
    numbers = module.weight.numel()
    per_head = heads is not None and numbers == getattr(config, "head_dim", None)
    return numbers * (int(getattr(config, heads)) if heads and per_head else 1)

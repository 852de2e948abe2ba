"""Which bits to choose: the quantizer's fields, and the recipes that name one quantizer for each GEMM operand.

A *recipe* is the numerics of the three GEMMs of a linear layer::

    fprop   y_MN  = x_MK  @ w_NK^T       contracted over K
    dgrad   dx_MK = dy_MN @ w_NK         contracted over N
    wgrad   dw_NK = dy_MN^T @ x_MK       contracted over M (tokens)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_nvfp4.errors import UserError, unknown

Format = Literal["nvfp4", "mxfp8", "s2f6", "fp8_block"]

_ELEMENTS = {"nvfp4": ("e2m1",), "mxfp8": ("e4m3", "e5m2"), "s2f6": ("s2f6",), "fp8_block": ("e4m3", "e5m2")}
_BLOCKS = {
    "nvfp4": ((1, 16), (16, 16)),
    "mxfp8": ((1, 32), (32, 32)),
    "s2f6": ((1, 32),),
    "fp8_block": ((1, 128), (128, 128)),
}
_HADAMARD = (0, 16, 32, 64, 128)


@dataclass(frozen=True)
class QuantSpec:
    """How one GEMM operand is quantized along its contracted dim.

    Fields left at ``None`` take the format's own value, so that an instance always holds the resolved choice.

    Attributes:
        format: ``nvfp4`` (E2M1, E4M3 scale), ``mxfp8`` (E8M0 scale), ``s2f6`` (fixed point, E8M0 scale) or
            ``fp8_block`` (E4M3, power-of-two scale of 1x128 or 128x128 blocks).
        element: element type; ``mxfp8`` and ``fp8_block`` take ``e4m3`` (default) or ``e5m2``.
        rounding: ``nearest`` (ties to even) or ``stochastic``.
        block: rows x length of a block, the length along the quantized dim.
        tensor_scale: outer FP32 scale of ``nvfp4``: one per ``tensor`` (default) or per ``row``; others ``none``.
        hadamard: length of the random Hadamard transform along the quantized dim; 0 is off. ``s2f6`` takes 32.
        hadamard_signs: signs (+1, -1) of the transform, repeated to its length; ``None`` = TE's 16 signs.
        four_over_six: choose per block between the largest element 6 and 4 by ``mae`` or ``mse`` (``nvfp4``, RNE).
        scale_rule: rounding of an E8M0 scale: ``ceil`` (nothing clips; TE, RCEIL) or ``floor`` (OCP).
        sr_bits: random bits of one stochastic rounding: 32 (exact to FP32) or 8 (TE's hardware).

    Raises:
        UserError: a value the format does not have.
    """

    format: Format = "nvfp4"
    element: Literal["e2m1", "e4m3", "e5m2", "s2f6"] | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    block: tuple[int, int] | None = None
    tensor_scale: Literal["tensor", "row", "none"] | None = None
    hadamard: int | None = None
    hadamard_signs: tuple[int, ...] | None = None
    four_over_six: Literal["mae", "mse"] | None = None
    scale_rule: Literal["ceil", "floor"] = "ceil"
    sr_bits: Literal[8, 32] = 32

    def __post_init__(self) -> None:
        if self.format not in _ELEMENTS:
            raise unknown("format", self.format, _ELEMENTS)
        nv = self.format == "nvfp4"
        fill = {
            "element": _ELEMENTS[self.format][0],
            "block": _BLOCKS[self.format][0],
            "tensor_scale": "tensor" if nv else "none",
            "hadamard": 32 if self.format == "s2f6" else 0,
        }
        for name, value in fill.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "block", tuple(self.block or ()))
        if self.hadamard_signs is not None:
            object.__setattr__(self, "hadamard_signs", tuple(self.hadamard_signs))
        scales = ("tensor", "row") if nv else ("none",)
        for name, allowed in (
            ("element", _ELEMENTS[self.format]),
            ("block", _BLOCKS[self.format]),
            ("tensor_scale", scales),
            ("rounding", ("nearest", "stochastic")),
            ("hadamard", _HADAMARD),
            ("scale_rule", ("ceil", "floor")),
            ("sr_bits", (8, 32)),
            ("four_over_six", (None, "mae", "mse") if nv else (None,)),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"QuantSpec.{name} = {getattr(self, name)!r} does not exist for format {self.format!r}: "
                    f"choose one of {', '.join(map(str, allowed))}."
                )
        if self.four_over_six and (self.rounding == "stochastic" or self.hadamard):
            raise UserError(
                f"QuantSpec.four_over_six = {self.four_over_six!r} needs rounding='nearest' and hadamard=0 "
                f"(got {self.rounding!r}, {self.hadamard}): set one of them back."
            )
        if self.hadamard_signs is not None and (
            not self.hadamard or self.hadamard % len(self.hadamard_signs) or set(self.hadamard_signs) - {1, -1}
        ):
            raise UserError(
                f"QuantSpec.hadamard_signs = {self.hadamard_signs!r} must be +1 and -1 only, of a length that divides "
                f"hadamard = {self.hadamard}: give 16 signs, or None for the default ones."
            )


Role = Literal["experts", "mlp", "linear"]
OPERANDS = (
    "fprop_input",
    "fprop_weight",
    "dgrad_grad_output",
    "dgrad_weight",
    "wgrad_grad_output",
    "wgrad_input",
)


@dataclass(frozen=True)
class GemmRecipe:
    """One quantizer for each operand of the three GEMMs; ``None`` is a BF16 operand.

    Attributes:
        fprop_input, fprop_weight: operands of ``y = x @ w^T``, blocks along K.
        dgrad_grad_output, dgrad_weight: operands of ``dx = dy @ w``, blocks along N.
        wgrad_grad_output, wgrad_input: operands of ``dw = dy^T @ x``, blocks along M (tokens).
        source: backward operands ``weight`` and ``input`` are quantized from the ``original`` tensors, or from what
            the forward GEMM saw (``dequantized``), so that the backward differentiates the forward that ran.
    """

    fprop_input: QuantSpec | None = None
    fprop_weight: QuantSpec | None = None
    dgrad_grad_output: QuantSpec | None = None
    dgrad_weight: QuantSpec | None = None
    wgrad_grad_output: QuantSpec | None = None
    wgrad_input: QuantSpec | None = None
    source: Literal["original", "dequantized"] = "original"

    def __post_init__(self) -> None:
        if self.source not in ("original", "dequantized"):
            raise unknown("GemmRecipe.source", self.source, ("original", "dequantized"))
        for gemm, a, b in (
            ("fprop", self.fprop_input, self.fprop_weight),
            ("dgrad", self.dgrad_grad_output, self.dgrad_weight),
            ("wgrad", self.wgrad_grad_output, self.wgrad_input),
        ):
            if (a.hadamard if a else 0, a.hadamard_signs if a else None) != (
                b.hadamard if b else 0,
                b.hadamard_signs if b else None,
            ):
                raise UserError(
                    f"GemmRecipe: the operands of {gemm} need the same hadamard and signs, or the transform does not "
                    f"cancel in the product (got {a and a.hadamard} and {b and b.hadamard}): set both."
                )

    def formats(self) -> frozenset[str]:
        """Return the formats of the operands."""
        return frozenset(spec.format for name in OPERANDS if (spec := getattr(self, name)) is not None)

    @property
    def tokens_alignment(self) -> int:
        """Multiple to which an expert's rows are padded, so that no block along tokens spans two experts."""
        specs = (self.wgrad_grad_output, self.wgrad_input)
        return max([max(spec.block[1], spec.hadamard or 0) for spec in specs if spec and spec.block], default=1)

    def forward_name(self) -> str:
        """Return the format of the forward GEMM, for tables."""
        return _pair_name(self.fprop_input, self.fprop_weight)

    def backward_name(self) -> str:
        """Return the formats of the two backward GEMMs, for tables."""
        names = {
            _pair_name(self.dgrad_grad_output, self.dgrad_weight),
            _pair_name(self.wgrad_grad_output, self.wgrad_input),
        }
        return " / ".join(sorted(names))


def _pair_name(a: QuantSpec | None, b: QuantSpec | None) -> str:
    def one(spec: QuantSpec | None) -> str:
        if spec is None:
            return "bf16"
        return spec.format + ("+SR" if spec.rounding == "stochastic" else "")

    return one(a) if one(a) == one(b) else f"{one(a)} x {one(b)}"


@dataclass(frozen=True)
class Rule:
    """A choice by path: the first rule whose pattern matches a module's path decides.

    Attributes:
        match: shell-style pattern over the module's full name, e.g. ``*.self_attn.*``.
        use: ``keep`` (high precision) or a key of `Recipe.gemms`.
    """

    match: str
    use: str


@dataclass(frozen=True)
class Recipe:
    """The numerics of a whole model: which layers are quantized, and how.

    Attributes:
        name: the preset it came from.
        gemms: named numerics. The roles ``experts`` (routed experts), ``mlp`` (MLP linears of a model without
            experts) and ``linear`` (other linears) are looked up here by default.
        rules: path rules tried before the roles; see `Rule`.
        roles: role -> key of ``gemms``, or ``keep``. Empty: nothing is converted.
        keep_first_blocks, keep_last_blocks: blocks left in high precision at both ends of the model; ``None`` is the
            paper's 2 and 8 of 62 in proportion (at least one last block). Source: arXiv:2509.25149, section 4.
    """

    name: str
    gemms: Mapping[str, GemmRecipe] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    roles: Mapping[str, str] = field(default_factory=lambda: {r: r for r in ("experts", "mlp", "linear")})
    keep_first_blocks: int | None = None
    keep_last_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_first_blocks", "keep_last_blocks"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise UserError(f"{name} = {value!r} must be a number of blocks >= 0, or null for the proportion.")
        for role in self.roles:
            if role not in ("experts", "mlp", "linear"):
                raise unknown("role", role, ("experts", "mlp", "linear"))
        for use in self.uses():
            if use not in self.gemms:
                raise unknown("gemm recipe", use, ("keep", *self.gemms))

    def uses(self) -> list[str]:
        """Return the keys of `gemms` that roles and rules name."""
        return [use for use in [*self.roles.values(), *(rule.use for rule in self.rules)] if use != "keep"]

    def formats(self) -> frozenset[str]:
        """Return the formats that any layer may have."""
        return frozenset().union(*(self.gemms[use].formats() for use in self.uses()))


def _nvfp4_hybrid() -> Recipe:
    token, weight = QuantSpec("nvfp4", tensor_scale="row"), QuantSpec("nvfp4")
    mx, mx_sr = QuantSpec("mxfp8"), QuantSpec("mxfp8", rounding="stochastic")
    hybrid = GemmRecipe(token, weight, mx_sr, mx, mx_sr, mx, source="dequantized")
    return Recipe(
        "nvfp4-hybrid",
        {"experts": hybrid, "mlp": hybrid, "linear": GemmRecipe(mx, mx, mx_sr, mx, mx_sr, mx)},
    )


def _same_everywhere(name: str, gemm: GemmRecipe) -> Recipe:
    return Recipe(name, {"experts": gemm, "mlp": gemm, "linear": gemm})


def _nvfp4() -> Recipe:
    act, weight = QuantSpec("nvfp4"), QuantSpec("nvfp4", block=(16, 16))
    grad = QuantSpec("nvfp4", rounding="stochastic")
    rht, rht_grad = QuantSpec("nvfp4", hadamard=16), QuantSpec("nvfp4", hadamard=16, rounding="stochastic")
    return _same_everywhere("nvfp4", GemmRecipe(act, weight, grad, weight, rht_grad, rht))


def _fp8() -> Recipe:
    act, weight = QuantSpec("fp8_block"), QuantSpec("fp8_block", block=(128, 128))
    return _same_everywhere("fp8", GemmRecipe(act, weight, act, weight, act, act))


PRESETS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _nvfp4_hybrid(),
        _nvfp4(),
        _same_everywhere("mxfp8", GemmRecipe(**dict.fromkeys(OPERANDS, QuantSpec("mxfp8")))),
        _fp8(),
        _same_everywhere("bf16-gemm", GemmRecipe()),
    )
}


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Return the preset `name` with `overrides` applied.

    Args:
        name: a key of `PRESETS`.
        overrides: nested fields, as a mapping, an OmegaConf container or a parsed YAML file, for example
            ``{"keep_last_blocks": 1, "gemms": {"experts": {"fprop_input": {"tensor_scale": "tensor"}}}}``.
            An operand given as ``null`` is BF16; ``roles: {}`` converts nothing.

    Raises:
        UserError: an unknown preset, field or value, with the nearest name.
    """
    if name not in PRESETS:
        raise unknown("precision preset", name, PRESETS)
    recipe = PRESETS[name]
    if not overrides:
        return recipe
    return _merge(recipe, _plain(overrides), "overrides")


def _plain(value: Any) -> Any:
    """Resolve an OmegaConf container into plain Python."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _merge(base: Any, changes: Any, path: str) -> Any:
    """Return dataclass `base` with the nested mapping `changes` applied; every field is checked by its class."""
    if not isinstance(changes, Mapping):
        raise UserError(f"{path} = {changes!r} must be a mapping of fields of {type(base).__name__}.")
    names = {f.name for f in dataclasses.fields(base)}
    new: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in names:
            raise unknown(f"{path}: field", key, names)
        new[key] = _merge_field(base, key, value, f"{path}.{key}")
    return _checked(lambda: dataclasses.replace(base, **new), path)


def _merge_field(base: Any, key: str, value: Any, path: str) -> Any:
    if isinstance(base, Recipe) and key == "gemms":
        if not isinstance(value, Mapping):
            raise UserError(f"{path} = {value!r} must be a mapping of name -> operands.")
        merged = {k: _merge(base.gemms.get(k, GemmRecipe()), v, f"{path}.{k}") for k, v in value.items()}
        return {**base.gemms, **merged}
    if isinstance(base, Recipe) and key == "rules":
        if not isinstance(value, list | tuple) or not all(isinstance(v, Mapping | Rule) for v in value):
            raise UserError(f"{path} = {value!r} must be a list of {{match: pattern, use: name}}.")
        return tuple(v if isinstance(v, Rule) else _rule(v, f"{path}[{i}]") for i, v in enumerate(value))
    if isinstance(base, GemmRecipe) and key in OPERANDS and isinstance(value, Mapping):
        old = getattr(base, key)
        if old is not None and value.get("format", old.format) == old.format:
            return _merge(old, value, path)
        return _merge(QuantSpec(**{"format": value.get("format", "nvfp4")}), value, path)
    return value


def _rule(value: Mapping[str, Any], path: str) -> Rule:
    for key in value:
        if key not in ("match", "use"):
            raise unknown(f"{path}: field", key, ("match", "use"))
    if {"match", "use"} - set(value):
        raise UserError(f"{path} = {dict(value)!r} needs both match (a path pattern) and use (a gemm name or keep).")
    return Rule(str(value["match"]), str(value["use"]))


def _checked(build: Any, path: str) -> Any:
    try:
        return build()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None

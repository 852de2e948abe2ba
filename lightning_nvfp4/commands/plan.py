"""`nvfp4 plan`: which layers of a model a precision converts, and why not the others; builds no weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lightning_nvfp4 import capability
from lightning_nvfp4.commands.console import make_console
from lightning_nvfp4.commands.parser import Parser
from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.yaml_files import block_scaled, read_mapping
from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.ops.te import plan as te_plan
from lightning_nvfp4.recipe import PRESETS, GemmRecipe, QuantSpec, Recipe, load_recipe
from lightning_nvfp4.selection import Decision, select

_MOST_RANGES = 6
_TE_VERSION = "2.20"
"""The Transformer Engine of a machine that is made up."""
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def run(arguments: list[str]) -> int:
    """Print the plan named on the command line and return the exit status."""
    parser = Parser("nvfp4 plan", "Show which layers are converted, to what and why.")
    parser.add_argument("--config", action="append", required=True, help="run recipe or model overlay; may be repeated")
    parser.add_argument(
        "--precision", help=f"{', '.join(PRESETS)}; default: that of the configuration, or nvfp4-hybrid"
    )
    parser.add_argument(
        "--compute-capability",
        metavar="MAJOR.MINOR",
        help="also show whether Transformer Engine would run on such a GPU (9.0, 10.0, 10.3, 12.0), and with which "
        "quantizers; needs neither",
    )
    options = parser.parse_args(arguments)
    machine = made_up_machine(options.compute_capability)
    sections = [read_mapping(find_config(name)) for name in options.config]
    recipe = find_recipe(sections, options.precision)
    fields, pretrained = find_model(sections, " + ".join(options.config))
    model = meta_model(fields, pretrained)
    decisions = select(model, recipe)
    numel = sum(parameter.numel() for parameter in model.parameters())
    console = make_console()
    console.print(f"{type(model).__name__}, {numel / 1e6:,.1f} M parameters, precision {recipe.name}", markup=False)
    console.print(coverage_table(decisions))
    console.print(summary(decisions), markup=False)
    if machine is not None:
        console.print()
        choice = capability.choose("auto", recipe, machine)
        console.print(f"auto on it: {choice.reason}", markup=False)
        if choice.backend == "te":
            console.print(quantizer_table(decisions))
    return 0


def made_up_machine(text: str | None) -> capability.Machine | None:
    """Return a machine with a GPU of this compute capability and Transformer Engine, ``None`` for ``None``.

    Raises:
        UserError: it is not two numbers.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if not match:
        raise UserError(f"--compute-capability is {text!r}: give two numbers, as 10.0 for a B200.")
    return capability.Machine((int(match[1]), int(match[2])), te=_TE_VERSION)


def quantizer_table(decisions: Iterable[Decision]) -> Table:
    """Return the table of Transformer Engine's quantizers: for each of the numerics, a row for each tensor."""
    table = Table(box=None, pad_edge=False)
    for title in ("layers", "TE recipe", "tensor", "quantizer"):
        table.add_column(title, overflow="fold")
    uses = {decision.use: decision.gemm for decision in decisions if decision.gemm is not None}
    for use, gemm in uses.items():
        reason = te_plan.uncovered(gemm)
        if reason:
            table.add_row(use, "none", "", f"emulated: {reason}")
            continue
        for tensor, quantizer in te_plan.planned(gemm).items():
            table.add_row(use, te_plan.builtin(gemm) or "CustomRecipe", tensor, quantizer.text())
    return table


def find_recipe(sections: Iterable[Mapping[str, Any]], precision: str | None) -> Recipe:
    """Return the numerics that the configurations ask for; `precision` overrules them; nvfp4-hybrid where none does.

    Raises:
        UserError: an unknown preset or override.
    """
    if precision is not None:
        return load_recipe(precision)
    recipe = load_recipe("nvfp4-hybrid")
    for section in sections:
        named, overrides = block_scaled(section, "the configuration")
        if named is not None:
            if named not in PRESETS:
                raise unknown("trainer.precision: block-scaled precision", named, PRESETS, "Or give --precision.")
            recipe = load_recipe(named, overrides)
    return recipe


def find_model(sections: Iterable[Mapping[str, Any]], where: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the model's configuration fields, or the checkpoint it is loaded from, as the last configuration has it.

    Raises:
        UserError: no configuration describes a model.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    fields: dict[str, Any] | None = None
    pretrained: str | None = None
    for section in sections:
        model = section.get("model") or {}
        init = model.get("init_args", model) if isinstance(model, Mapping) else {}
        if not isinstance(init, Mapping):
            raise UserError(f"{where}: model.init_args = {init!r} must be a mapping of fields.")
        if isinstance(init.get("model"), Mapping):
            try:
                resolved = OmegaConf.to_container(OmegaConf.create({"model": dict(init["model"])}), resolve=True)
            except OmegaConfBaseException as error:
                raise UserError(f"{where}: model: {' '.join(str(error).split())}. Mend that value.") from error
            assert isinstance(resolved, dict)
            fields, pretrained = resolved["model"], None
        elif init.get("pretrained"):
            fields, pretrained = None, str(init["pretrained"])
    if fields is None and pretrained is None:
        raise UserError(
            f"{where}: no model: expected model.init_args.model (with model_type) or model.init_args.pretrained. "
            "Add a model overlay: --config recipes/model/tiny-moe.yaml."
        )
    return fields, pretrained


def meta_model(fields: dict[str, Any] | None, pretrained: str | None) -> Any:
    """Return the Hugging Face model on the meta device: shapes and names without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_nvfp4.lm.hf_model import build_config, resolve_pretrained

    if fields is not None:
        config = build_config(fields)
    else:
        source = resolve_pretrained(str(pretrained))
        try:
            config = AutoConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise UserError(f"model.init_args.pretrained = {pretrained!r} cannot be read: {error}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@dataclass
class Row:
    """Layers that differ only in their numbers and are treated alike."""

    path: str
    count: int
    decision: Decision


def rows(decisions: Iterable[Decision]) -> list[Row]:
    """Collapse layers of one shape, treatment and reason whose paths differ in numbers only; keep the order."""
    groups: dict[tuple[Any, ...], list[Decision]] = {}
    for decision in decisions:
        pattern = _NUMBER.sub(".#", decision.path)
        groups.setdefault((pattern, decision.shape, decision.use, decision.reason), []).append(decision)
    return [Row(_joined(pattern, members), len(members), members[0]) for (pattern, *_), members in groups.items()]


def _joined(pattern: str, members: list[Decision]) -> str:
    """Write the numbers of the members into the pattern, as ranges: `layers.{2..43}.mlp.experts`."""
    columns = zip(*(map(int, _NUMBER.findall(member.path)) for member in members), strict=True)
    for column in columns:
        pattern = pattern.replace("#", _ranges(sorted(set(column))), 1)
    return pattern


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [f"{part[0]}..{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    if len(texts) > _MOST_RANGES:
        texts = [*texts[: _MOST_RANGES - 1], "...", texts[-1]]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"


def coverage_table(decisions: Iterable[Decision]) -> Table:
    """Return the table: path, number of layers, shape, formats of forward and backward, reason."""
    table = Table(box=None, pad_edge=False)
    for title in ("path", "layers", "shape", "fprop", "backward", "reason"):
        justify = "right" if title == "layers" else "left"
        table.add_column(title, overflow="fold", justify=justify, no_wrap=title in ("path", "shape"))
    for row in rows(decisions):
        gemm = row.decision.gemm
        table.add_row(
            row.path,
            str(row.count),
            " x ".join(map(str, row.decision.shape)),
            gemm.forward_name() if gemm else "-",
            gemm.backward_name() if gemm else "-",
            row.decision.reason,
        )
    return table


def summary(decisions: list[Decision]) -> str:
    """Return the shares of the weight GEMMs' FLOPs by bits; routed experts count as a token visits them."""
    whole = sum(decision.flops for decision in decisions) or 1
    forward = {bits: 0.0 for bits in (4, 8, 16)}
    training = {bits: 0.0 for bits in (4, 8, 16)}
    for decision in decisions:
        share = decision.flops / whole
        for index, bits in enumerate(_bits(decision.gemm)):
            training[bits] += share / 3
            if index == 0:
                forward[bits] += share
    converted = sum(decision.gemm is not None for decision in decisions)
    lines = [f"{converted} of {len(decisions)} layers converted. Share of GEMM FLOPs (attention products not counted):"]
    for name, shares in (("forward", forward), ("forward + backward", training)):
        parts = (f"{share:6.1%} in {bits} bits" for bits, share in shares.items())
        lines.append(f"  {name:<19} {', '.join(parts)}")
    return "\n".join(lines)


def _bits(gemm: GemmRecipe | None) -> tuple[int, int, int]:
    """Return the bits of the wider operand of fprop, dgrad and wgrad."""
    if gemm is None:
        return 16, 16, 16
    return (
        max(_width(gemm.fprop_input), _width(gemm.fprop_weight)),
        max(_width(gemm.dgrad_grad_output), _width(gemm.dgrad_weight)),
        max(_width(gemm.wgrad_grad_output), _width(gemm.wgrad_input)),
    )


def _width(spec: QuantSpec | None) -> int:
    return 16 if spec is None else 4 if spec.element == "e2m1" else 8

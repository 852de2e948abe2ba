"""The estimate as tables: speed-ups, shares of the parts, what the claims need, and published figures beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_nvfp4.estimate.architecture import read_architecture
from lightning_nvfp4.estimate.claims import PretrainingClaim, RlClaim, pretraining_claim, rl_claim
from lightning_nvfp4.estimate.hardware import Hardware
from lightning_nvfp4.estimate.parts import PARTS, Times
from lightning_nvfp4.estimate.published import Outcome
from lightning_nvfp4.estimate.rollout import RlStep, rl_step
from lightning_nvfp4.estimate.stacks import FUSED, TE_TODAY
from lightning_nvfp4.estimate.step_model import StepModel
from lightning_nvfp4.estimate.workload import Workload
from lightning_nvfp4.recipe import Recipe, load_recipe
from lightning_nvfp4.selection import select

NOTICE = (
    "A model on paper: counts of multiply-adds and bytes over datasheet rates and stated efficiencies. Nothing here is "
    "a measurement, and no kernel of the fused stack exists."
)


@dataclass(frozen=True)
class Table:
    """A titled table of texts."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Arm:
    """One precision on one GPU type under one stack.

    Attributes:
        label: the precision, with its codec where it has one.
        tokens: tokens/s of each GPU in pretraining.
    """

    hardware: str
    stack: str
    label: str
    pretraining: Times
    rl: RlStep
    tokens: float


@dataclass(frozen=True)
class Group:
    """The arms of one GPU type under one stack: BF16, 8 bits, and the others with what the claims need of them."""

    bf16: Arm
    eight_bit: Arm
    others: tuple[tuple[Arm, PretrainingClaim, RlClaim], ...]

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, the baselines first."""
        return (self.bf16, self.eight_bit, *(arm for arm, _, _ in self.others))


def estimate(
    model: nn.Module, recipe: Recipe, hardware: Iterable[Hardware], workload: Workload, codec: str = "none"
) -> list[Group]:
    """Return the groups of every hardware, for what Transformer Engine does today and for a fused path.

    Args:
        model: a causal language model, best on the meta device.
        recipe: the precision to judge; BF16 and the 8-bit baseline keep the layers and blocks that its rules keep.
        hardware: GPU types. The baseline is ``mxfp8``, or ``fp8`` where MXFP8 is not native.
        workload: what is run.
        codec: wire format of a second arm of `recipe`; ``none`` leaves that arm out.
    """
    own = read_architecture(model, select(model, recipe))
    counts = {}
    for name in ("bf16-gemm", "mxfp8", "fp8"):
        other = replace(
            load_recipe(name),
            rules=tuple(rule for rule in recipe.rules if rule.use == "keep"),
            keep_first_blocks=recipe.keep_first_blocks,
            keep_last_blocks=recipe.keep_last_blocks,
        )
        counts[name] = read_architecture(model, select(model, other))
    groups = []
    for gpu in hardware:
        eight = "mxfp8" if gpu.native("mxfp8") else "fp8"
        for stack in (TE_TODAY, FUSED):
            bf16 = StepModel(counts["bf16-gemm"], gpu, stack)
            base = StepModel(counts[eight], gpu, stack)
            base_arm = _arm(base, workload, eight)
            others = []
            for wire in dict.fromkeys(("none", codec)):
                step_model = StepModel(own, gpu, stack, wire)
                arm = _arm(step_model, workload, recipe.name + ("" if wire == "none" else f" + {wire} wire"))
                claim = pretraining_claim(base, step_model, workload.pretraining)
                others.append((arm, claim, rl_claim(base_arm.rl, arm.rl)))
            groups.append(Group(_arm(bf16, workload, "bf16-gemm"), base_arm, tuple(others)))
    return groups


def _arm(model: StepModel, workload: Workload, label: str) -> Arm:
    training = workload.pretraining
    times = model.step(training)
    tokens = training.tokens * training.micro_batches * training.replicas / training.gpus / times.total
    rl = rl_step(model, workload.rl_training, workload.rollout)
    return Arm(model.hardware.name, model.stack.name, label, times, rl, tokens)


def tables(groups: Sequence[Group]) -> list[Table]:
    """Return the tables of an estimate."""
    return [_speed_table(groups), *_share_tables(groups), _pretraining_table(groups), _rl_table(groups)]


def _speed_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        for arm in group.arms:
            times = [
                (arm.pretraining.total, group.eight_bit.pretraining.total, group.bf16.pretraining.total),
                (arm.rl.total, group.eight_bit.rl.total, group.bf16.rl.total),
            ]
            cells = [arm.hardware, arm.stack, arm.label, f"{arm.tokens:,.0f}"]
            for own, eight, bf16 in times:
                cells += [f"{own:.2f}", f"{eight / own:.3f}", f"{bf16 / own:.3f}"]
            rows.append(tuple(cells))
    header = ("GPU", "stack", "precision", "tokens/s/GPU")
    for name in ("pretraining", "RL"):
        header += (f"{name} s", "x 8-bit", "x bf16")
    return Table("Speed of a step, and over the 8-bit and BF16 arms", header, tuple(rows))


def _share_tables(groups: Sequence[Group]) -> list[Table]:
    found = []
    readers: list[tuple[str, Callable[[Arm], Times]]] = [
        ("pretraining", lambda arm: arm.pretraining),
        ("reinforcement learning", lambda arm: arm.rl.times),
    ]
    for name, read in readers:
        present = [part for part in PARTS if any(read(a).seconds[part] for g in groups for a in g.arms)]
        rows = tuple(
            (arm.hardware, arm.stack, arm.label, *(_percent(read(arm).shares()[part]) for part in present))
            for group in groups
            for arm in group.arms[1:]
        )
        found.append(Table(f"Share of each part, {name} (%)", ("GPU", "stack", "precision", *present), rows))
    return found


def _pretraining_table(groups: Sequence[Group]) -> Table:
    rows = tuple(
        (
            *(arm.hardware, arm.stack, arm.label),
            *(_gain(claim.claimed), _gain(claim.modelled), _gain(claim.bound)),
            *(_share(claim.share), _share(claim.needed_share)),
            *(f"{claim.speed:.2f} x", _times(claim.needed_speed)),
        )
        for group in groups
        for arm, claim, _ in group.others
    )
    header = ("GPU", "stack", "precision", "claimed", "modelled", "if 4-bit GEMMs were free")
    header += ("share of 4-bit GEMMs", "needed", "their speed", "needed speed")
    return Table("What the pretraining claim needs, over the 8-bit arm", header, rows)


def _rl_table(groups: Sequence[Group]) -> Table:
    rows = tuple(
        (
            *(arm.hardware, arm.stack, arm.label, _gain(claim.claimed), _gain(claim.modelled)),
            *(_share(claim.share), _share(claim.needed_share)),
            *(f"{claim.rollout:.2f} x", _times(claim.needed_rollout), f"{claim.training:.2f} x"),
        )
        for group in groups
        for arm, _, claim in group.others
    )
    header = ("GPU", "stack", "precision", "claimed", "modelled", "share of rollout", "needed share")
    header += ("rollout speed-up", "needed speed-up", "training speed-up")
    return Table("What the reinforcement-learning claim needs, over the 8-bit arm", header, rows)


def published_table(outcomes: Sequence[Outcome]) -> Table:
    """Return published figures beside the model's."""
    rows = []
    for one in outcomes:
        figures = one.case.published
        tokens = [
            (figures.baseline_tokens, one.baseline_tokens),
            (figures.candidate_tokens, one.candidate_tokens),
        ]
        rows.append(
            (
                *(one.case.name, one.case.hardware, f"{one.case.baseline} -> {one.case.candidate}"),
                *(
                    _gain(figures.gain),
                    _gain(one.gain),
                    _if_known(figures.gain, 100 * (one.gain - figures.gain), "+.1f"),
                ),
                *(_if_known(said, said, ",.0f", f" / {own:,.0f}") for said, own in tokens),
                one.case.source + (f". Assumed: {one.case.assumed}" if one.case.assumed else ""),
            )
        )
    header = ("what", "GPU", "arms", "published", "model", "points off", "tokens/s/GPU before", "and after", "source")
    return Table("Published gains (published / model)", header, tuple(rows))


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Return how far the model is from the published gains, by what was compared."""
    groups: dict[str, list[float]] = {}
    for one in outcomes:
        if math.isnan(one.case.published.gain):
            continue
        if one.case.rollout is not None:
            name = "reinforcement learning"
        else:
            name = f"pretraining over {'BF16' if one.case.baseline == 'bf16' else 'MXFP8'}"
        groups.setdefault(name, []).append(one.gain - one.case.published.gain)
    parts = [
        f"{name}, {100 * sum(map(abs, off)) / len(off):.1f} (above in {sum(value > 0 for value in off)} of {len(off)})"
        for name, off in groups.items()
    ]
    return f"No rate was fitted to published gains. Mean distance in points: {'; '.join(parts)}."


def records(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one record for each GPU, stack, precision, workload and part."""
    found = []
    for group in groups:
        for arm in group.arms:
            for workload, times in (("pretraining", arm.pretraining), ("rl", arm.rl.times)):
                place = {"gpu": arm.hardware, "stack": arm.stack, "precision": arm.label, "workload": workload}
                shares = times.shares()
                found += [
                    {**place, "part": part, "seconds": seconds, "share": shares[part]}
                    for part, seconds in times.seconds.items()
                ]
    return found


def _gain(value: float) -> str:
    return _if_known(value, 100 * value, "+.1f", " %")


def _if_known(known: float, value: float, form: str, unit: str = "") -> str:
    return "" if math.isnan(known) else f"{value:{form}}{unit}"


def _share(value: float | None) -> str:
    return "never" if value is None else f"{100 * value:.1f} %"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if value else "-"


def _times(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} x"

"""What a pipeline runs: the checked contents of a pipeline YAML, and the record that says when it has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import yaml

from lightning_nvfp4.commands.paths import find_config
from lightning_nvfp4.commands.yaml_files import block_scaled, read_mapping
from lightning_nvfp4.errors import UserError, check_types, unknown
from lightning_nvfp4.recipe import PRESETS, load_recipe


@dataclass
class Stage:
    """One `nvfp4 fit` of an arm.

    Attributes:
        name: of its folder.
        config: run recipe.
        continues: stage whose Lightning checkpoint it continues: weights, optimizer and step.
        starts_from: stage whose Hugging Face folder it starts from: weights and tokenizer.
        set: dotted keys of the run recipe with the values that replace its own.
    """

    name: str
    config: str
    continues: str | None = None
    starts_from: str | None = None
    set: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evaluation:
    """Which stages are evaluated after they have run, on what, on how many documents of a task (None = all)."""

    config: str = "eval/embedded.yaml"
    stages: list[str] = field(default_factory=list)
    limit: int | None = None


@dataclass
class Arm:
    """One precision: the name of its folder, the overlay laid over every stage, and the numerics it evaluates in."""

    name: str
    overlay: str
    precision: str
    overrides: dict[str, Any] | None = None


@dataclass
class Pipeline:
    """A pipeline YAML; see recipes/pipeline.yaml.

    `lanes` arms run at a time with `threads` CPU threads each; `notes` are shown first in the report.
    """

    stages: list[Stage]
    arms: list[str]
    seed: int = 0
    baseline: str = "bf16-gemm"
    lanes: int = 2
    threads: int = 1
    overlays: list[str] = field(default_factory=list)
    eval: Evaluation | None = None
    notes: list[str] = field(default_factory=list)


def load_pipeline(name: str, overrides: list[str]) -> Pipeline:
    """Read a pipeline YAML and apply `key=value` words.

    Args:
        name: a path or a packaged name.
        overrides: `KEY=VALUE` for a field of the pipeline, `STAGE.KEY=VALUE` for one of a run recipe; VALUE is YAML.

    Raises:
        UserError: an unknown key, a value of the wrong kind, a stage or file that does not exist.
    """
    path = find_config(name)
    values = read_mapping(path)
    stages = values.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UserError(
            f"{path}: 'stages' must be a list of stages, each with name and config; see recipes/pipeline.yaml."
        )
    loaded: list[Stage] = []
    for index, item in enumerate(stages):
        _check(item, Stage, f"{path}: stages[{index}]", required=("name", "config"))
        loaded.append(Stage(**item))
    names = [stage.name for stage in loaded]
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"argument {word!r} is not KEY=VALUE, for example pretrain.trainer.max_steps=1000.")
        value = _yaml_value(word, text)
        head, _, rest = key.partition(".")
        if head in names and rest:
            next(stage for stage in loaded if stage.name == head).set[rest] = value
        elif head == "eval" and rest:
            values["eval"] = {**(values.get("eval") or {}), rest: value}
        elif rest or head not in {f.name for f in fields(Pipeline)} - {"stages"}:
            raise unknown(
                f"argument {word!r}: key", key, [*(f"{n}." for n in names), *(f.name for f in fields(Pipeline))]
            )
        else:
            values[key] = value
    _check(values, Pipeline, str(path), required=("stages", "arms"))
    if values.get("eval") is not None:
        _check(values["eval"], Evaluation, f"{path}: eval", required=("config", "stages"))
        values["eval"] = Evaluation(**values["eval"])
    pipeline = Pipeline(**{**values, "stages": loaded})
    _check_values(pipeline, str(path))
    return pipeline


def _check(value: Any, kind: type, where: str, required: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} = {value!r} must be a mapping.")
    names = [f.name for f in fields(kind)]
    for key in value:
        if key not in names:
            raise unknown(f"{where}: key", key, names)
    for key in required:
        if not value.get(key):
            raise UserError(f"{where}: {key!r} is missing or empty: add it; see recipes/pipeline.yaml.")
    check_types(value, kind, where)


def _check_values(pipeline: Pipeline, path: str) -> None:
    names = [stage.name for stage in pipeline.stages]
    for name in names:
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum() or names.count(name) > 1:
            raise UserError(f"{path}: stage name {name!r} must be one plain word, different from the others.")
    for index, stage in enumerate(pipeline.stages):
        if stage.continues and stage.starts_from:
            raise UserError(f"{path}: stage {stage.name!r} has both continues and starts_from: keep one of them.")
        origin = stage.continues or stage.starts_from
        if origin and origin not in names[:index]:
            raise UserError(
                f"{path}: stage {stage.name!r} needs {origin!r}, which is no stage before it: mend the name or order."
            )
        find_config(stage.config)
    for key, least in (("lanes", 1), ("threads", 1), ("seed", 0)):
        value = getattr(pipeline, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{path}: {key} = {value!r} must be a whole number, at least {least}.")
    for overlay in pipeline.overlays:
        find_config(overlay)
    if pipeline.eval is None:
        return
    find_config(pipeline.eval.config)
    for stage in pipeline.eval.stages:
        if stage not in names:
            raise unknown(f"{path}: eval.stages: stage", stage, names)
    limit = pipeline.eval.limit
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UserError(f"{path}: eval.limit = {limit!r} must be a whole number of documents, or null for all.")


def load_arm(name: str) -> Arm:
    """Return the arm for a precision name or for the path of an overlay YAML.

    Raises:
        UserError: no such precision or file, or an overlay that names no precision.
    """
    if name in PRESETS:
        return Arm(name, str(find_config(f"recipes/precision/{name}.yaml")), name)
    if not name.endswith((".yaml", ".yml")):
        raise unknown("arm", name, PRESETS, "Give one of these, or the path of an overlay YAML.")
    path = find_config(name)
    precision, overrides = block_scaled(read_mapping(path), str(path))
    if precision not in PRESETS:
        raise UserError(
            f"{path}: sets no block-scaled precision (found {precision!r}): give trainer.precision, or a "
            f"BlockScaledPrecision plugin, one of {', '.join(PRESETS)}."
        )
    load_recipe(precision, overrides)
    return Arm(path.stem, str(path), precision, overrides)


def record(pipeline: Pipeline, arms: list[Arm]) -> dict[str, Any]:
    """Return everything that determines the results, contents of the named files included, as flat dotted keys."""
    values = asdict(pipeline)
    for key in ("arms", "lanes", "baseline", "notes"):  # none of them changes what an arm computes
        values.pop(key)
    flat = dict(_flatten("", {**values, "stages": {stage["name"]: stage for stage in values["stages"]}}))
    files = {f"file {stage.name}": stage.config for stage in pipeline.stages}
    files |= {f"overlay {overlay}": overlay for overlay in pipeline.overlays}
    files |= {f"arm {arm.name}": arm.overlay for arm in arms}
    if pipeline.eval:
        files["file eval"] = pipeline.eval.config
    for label, name in files.items():
        flat |= {f"{label}: {key}": value for key, value in _flatten("", read_mapping(find_config(name)))}
    return json.loads(json.dumps(flat, default=str))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line for each key that two records both speak of and disagree on; a new arm is no disagreement."""
    arms = {key.split(":")[0] for key in old if key.startswith("arm ")} & {
        key.split(":")[0] for key in new if key.startswith("arm ")
    }
    lines = []
    for key in sorted({*old, *new}):
        if key.startswith("arm ") and key.split(":")[0] not in arms:
            continue
        missing = "(absent)"
        if old.get(key, missing) != new.get(key, missing):
            lines.append(f"{key}: {old.get(key, missing)!r} -> {new.get(key, missing)!r}")
    return lines


def _yaml_value(word: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"argument {word!r}: {text!r} is not a YAML value; quote it for the shell.") from error


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, leaf) pairs."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value

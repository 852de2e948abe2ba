"""Reading YAML so that every complaint can name the file and the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_nvfp4.errors import UserError


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, empty for an empty file.

    Raises:
        UserError: unreadable file, YAML syntax error (with its line), a key given twice, or no mapping at the top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration {path} cannot be read ({error}): give a readable UTF-8 YAML file.") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML ({error.problem}): mend that line.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({error}).") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__}, expected a mapping of 'key: value' lines.")
    seen: set[str] = set()
    try:
        keys = list(_keys(root, ""))
    except RecursionError as error:
        raise UserError(f"{path}: an alias (*name) stands inside what it names: write its value out.") from error
    for key, line in keys:
        if key in seen:
            raise UserError(f"{path}, line {line}: key {key!r} is given twice: keep one of them.")
        seen.add(key)
    return value


def block_scaled(section: Mapping[str, Any], where: str) -> tuple[str | None, Any]:
    """Return the precision that a configuration sets, by name or by a `BlockScaledPrecision` plugin, and its overrides.

    Raises:
        UserError: the section of the trainer, or of the plugin, is no mapping, or the precision is no text.
    """
    trainer = _mapping(section.get("trainer"), f"{where}: trainer")
    precision, overrides = trainer.get("precision"), None
    plugins = trainer.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, Mapping) and str(plugin.get("class_path", "")).endswith("BlockScaledPrecision"):
            init = _mapping(plugin.get("init_args"), f"{where}: trainer.plugins.init_args")
            precision, overrides = init.get("preset", "nvfp4-hybrid"), init.get("overrides")
    if precision is not None and not isinstance(precision, str):
        raise UserError(f"{where}: the precision is {precision!r}: give one name.")
    return precision, overrides


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where} = {value!r} must be a mapping of fields.")
    return value


def line_of(path: Path, key: str) -> int | None:
    """Return the line (from 1) where a YAML file has a key: a dotted path, or its last part alone."""
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    found = list(_keys(root, ""))
    for name, line in found:
        if name == key or name.endswith(f".{key}"):
            return line
    # `init_args` may be left out of a key on the command line and in messages.
    for name, line in found:
        if name.replace(".init_args", "") == key.replace(".init_args", ""):
            return line
    return None


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            name = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            if key_node.tag != "tag:yaml.org,2002:merge":
                yield name, key_node.start_mark.line + 1
            yield from _keys(value_node, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(item, f"{prefix}.{index}")

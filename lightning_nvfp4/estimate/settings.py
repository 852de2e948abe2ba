"""Numbers read from YAML into dataclasses, each with its unit and range; a wrong one is named by its path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_nvfp4.errors import UserError, unknown

T = TypeVar("T")


def number(
    meaning: str, *, default: Any = MISSING, least: float | None = None, most: float = math.inf, names: Any = ()
) -> Any:
    """Return a dataclass field that holds a number, or a mapping of `names` to numbers.

    Args:
        meaning: what it is, with its unit; part of every complaint.
        default: value where the YAML has none; without it the field is required.
        least: smallest allowed value; by default any value above zero.
        most: largest allowed value.
        names: keys a mapping may have.
    """
    metadata = {"meaning": meaning, "least": least, "most": most, "names": tuple(names)}
    return field(default=default, metadata=metadata)


def load(kind: type[T], content: Any, where: str, path: str = "") -> T:
    """Return dataclass `kind` filled from a mapping.

    Args:
        kind: a dataclass whose fields are `number`s, texts, flags or such dataclasses.
        content: what the YAML holds.
        where: the file, for messages.
        path: the keys that lead to `content`, joined by dots.

    Raises:
        UserError: an unknown, missing or impossible value; the message names file, path, value, rule and cure.
    """
    prefix = f"{path}." if path else ""
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: {path or 'content'} = {content!r} must be a mapping of fields: write 'key: value'.")
    hints = get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in content:
        if key not in fields:
            raise unknown(f"{where}: field", f"{prefix}{key}", [f"{prefix}{name}" for name in fields])
    values: dict[str, Any] = {}
    for name, spec in fields.items():
        if name in content:
            values[name] = _value(hints[name], spec.metadata, content[name], where, f"{prefix}{name}")
        elif spec.default is MISSING and spec.default_factory is MISSING:
            meaning = spec.metadata.get("meaning", "it is required")
            raise UserError(f"{where}: {prefix}{name} is missing ({meaning}): add it.")
    return kind(**values)


def _value(hint: Any, metadata: Mapping[str, Any], value: Any, where: str, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return load(hint, value, where, path)  # type: ignore[arg-type]
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping) or not value:
            raise UserError(f"{where}: {path} = {value!r} must map {', '.join(metadata['names'])} to numbers.")
        for key in value:
            if key not in metadata["names"]:
                raise unknown(f"{where}: {path}: name", key, metadata["names"])
        inner = get_args(hint)[1]
        return {key: _number(inner, metadata, item, where, f"{path}.{key}") for key, item in value.items()}
    if hint in (int, float):
        return _number(hint, metadata, value, where, path)
    if not isinstance(value, hint):
        wanted = {str: "text", bool: "true or false"}[hint]
        raise UserError(f"{where}: {path} = {value!r} must be {wanted}.")
    return value


def _number(kind: type, metadata: Mapping[str, Any], value: Any, where: str, path: str) -> Any:
    least, most = metadata["least"], metadata["most"]
    rule = "above 0" if least is None else f"at least {least:g}"
    if most < math.inf:
        rule += f" and at most {most:g}"
    kinds = (int,) if kind is int else (int, float)
    good = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value > most or (value <= 0 if least is None else value < least):
        word = "a whole number" if kind is int else "a number"
        raise UserError(f"{where}: {path} = {value!r} must be {word} {rule}: give {metadata['meaning']}.")
    return kind(value)

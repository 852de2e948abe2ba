"""Turns the parser's complaints into one message with the file, the line, the value, the rule and the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_nvfp4.commands.yaml_files import line_of, read_mapping
from lightning_nvfp4.errors import UserError

_NOISE = re.compile(
    r"^\s*(Subtypes:|Errors:|Given value type:|- Expected a <class 'NoneType'>|Does not validate against|Problem with)"
)
_UNKNOWN = (
    re.compile(r"unrecognized arguments: --(?P<key>[\w.]+)"),
    re.compile(r"(?:Subcommand|Group) '(?P<owner>[^']*)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),
    re.compile(r"No action for key \"(?P<key>[^\"]+)\""),
)
_CLASS = re.compile(r"class_path '(?P<path>[\w.]+)'")
_KEY = re.compile(r"Parser key \"(?P<key>[^\"]+)\"")
_GOT = re.compile(r"(?:Got value|Given value): (?P<value>.*)")


def explain(message: str, files: list[Path], arguments: list[str], known: Iterable[str]) -> UserError:
    """Return a `UserError` for a parser error.

    Args:
        message: the parser's text.
        files: the configuration files given, in order.
        arguments: the command line's words.
        known: full dotted keys that the parser has.
    """
    for pattern in _UNKNOWN:
        if match := pattern.search(message):
            return _unknown_key(match["key"], message, files, arguments, set(known))
    keys = _KEY.findall(message)
    if keys:
        return _bad_value(keys, message, files, arguments)
    return UserError(f"{' '.join(message.split())}. `nvfp4 --help` and `nvfp4 fit --help` list what there is.")


def _unknown_key(key: str, message: str, files: list[Path], arguments: list[str], known: set[str]) -> UserError:
    prefix, _, leaf = key.rpartition(".")
    classes = set(_CLASS.findall(message)) or set(_class_paths(files, arguments))
    if prefix and any(name.startswith(f"{prefix}.") for name in known):
        names = {name[len(prefix) + 1 :].split(".")[0] for name in known if name.startswith(f"{prefix}.")}
    elif _CLASS.search(message) or prefix:
        names = {name for path in classes for name in _parameters(path)}
    else:
        names = {name.split(".")[0] for name in known}
    near = difflib.get_close_matches(leaf, sorted(names), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(
        f"{_where(key, files, arguments)}: key {key!r} is unknown.{hint} "
        "Mend its name or remove it; `nvfp4 fit --help` lists the keys, `--model.help` and `--data.help` a class's own."
    )


def _bad_value(keys: list[str], message: str, files: list[Path], arguments: list[str]) -> UserError:
    key = ".".join(dict.fromkeys(keys)) if len(keys) > 1 and not keys[-1].startswith(keys[0]) else keys[-1]
    values = [value for value in _GOT.findall(message) if not value.startswith("NestedArg")]
    value = values[0].strip() if values else None
    choices = [
        text for group in re.findall(r"Literal\[([^\]]*)\]", message) for text in re.findall(r"'([^']+)'", group)
    ]
    rules = re.findall(r"Expected an? <class '(?:\w+\.)*(\w+)'>", message)
    parts = [f"{_where(key, files, arguments)}: {key}"]
    parts.append(f" = {value!r} is not accepted." if value is not None else " is not accepted.")
    if choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        parts.append(f" Did you mean {near[0]!r}?" if near else "")
        parts.append(f" Choose one of {', '.join(dict.fromkeys(choices))}.")
    elif expected := [rule for rule in dict.fromkeys(rules) if rule != "NoneType"]:
        parts.append(f" Expected {' or '.join(expected)}: give a value of that kind.")
    else:
        lines = (line.strip(" -") for line in message.splitlines() if not _NOISE.match(line))
        detail = " ".join(line for line in lines if line and not line.startswith(("Parser key", "Given value")))
        parts.append(f" {detail}" if detail else "")
        parts.append(" Give a class path that can be imported, or a value of the documented type.")
    return UserError("".join(parts))


def _where(key: str, files: list[Path], arguments: list[str]) -> str:
    leaf = key.rpartition(".")[2]
    if any(word.startswith("--") and word[2:].partition("=")[0].endswith(leaf) for word in arguments):
        return "command line"
    for name in dict.fromkeys((key, leaf)):
        for path in reversed(files):
            if line := line_of(path, name):
                return f"{path}, line {line}"
    return "command line" if not files else " + ".join(map(str, files))


def _class_paths(files: list[Path], arguments: list[str]) -> Iterator[str]:
    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("class_path"), str):
                yield value["class_path"]
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)

    for path in files:
        yield from walk(read_mapping(path))
    yield from (word for word in arguments if re.fullmatch(r"(\w+\.)+\w+", word))


def _parameters(class_path: str) -> Iterator[str]:
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
        hints = typing.get_type_hints(cls.__init__)
    except (ImportError, AttributeError, ValueError, NameError, TypeError):
        return
    for parameter in inspect.signature(cls.__init__).parameters:
        if parameter == "self":
            continue
        yield parameter
        kind = hints.get(parameter)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from (field.name for field in dataclasses.fields(kind))

"""The YAML of an evaluation: which tasks, on which documents, in which form."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_nvfp4.errors import UserError, check_types, unknown
from lightning_nvfp4.evaluation.code import CodeLimits


@dataclass(frozen=True)
class TaskSpec:
    """One task of a suite: a definition of our own (`definition`) or one that lm-evaluation-harness has (`stock`).

    Attributes:
        definition: YAML file relative to the suite's file.
        stock: name of a task or group of lm-evaluation-harness.
        count: documents to draw (those that are made here only).
        limit: score this many documents only: the first, of each part alike where the task has parts.
        fewshot: examples before each question; None = the definition's own.
        chat_template: overrides the suite's.
        code: the answer is a program, judged by running it (needs permission to execute code).
        samples: answers drawn for each document; pass@k is given for every k of 1, 10, 100 up to it. More than one
            needs a temperature.
        temperature: of sampling; None = the definition's own decoding (greedy).
        batch_size: overrides the suite's.
    """

    definition: str | None = None
    stock: str | None = None
    count: int | None = None
    limit: int | None = None
    fewshot: int | None = None
    chat_template: bool | None = None
    code: bool = False
    samples: int = 1
    temperature: float | int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Suite:
    """An evaluation configuration.

    Attributes:
        name: of the suite.
        tasks: by the name that results use.
        batch_size: requests in one forward.
        chat_template: put questions into the tokenizer's chat template.
        max_length: tokens of context; None = the model's own.
        offline: refuse the network (Hugging Face libraries included).
        data_dir: folder that the files of definitions are relative to.
        fewshot_seed: which few-shot examples are drawn; 1234 is lm-evaluation-harness's own.
        folder: where the suite's file is; definitions are relative to it.
    """

    name: str
    tasks: dict[str, TaskSpec]
    batch_size: int = 16
    chat_template: bool = False
    max_length: int | None = None
    offline: bool = True
    data_dir: str = "."
    fewshot_seed: int = 1234
    folder: Path = field(default=Path(), compare=False)

    def resolved(self) -> dict[str, Any]:
        """Return the configuration as plain data, for the record."""
        content = asdict(self)
        content["folder"] = str(self.folder)
        return content


@dataclass(frozen=True)
class Definition:
    """A task of our own.

    Attributes:
        documents: where they come from; see `documents.load_documents`.
        judge: ``"match"`` (the metrics of `harness`) or ``"code"`` (pass@k in the sandbox).
        limits: fields of `CodeLimits`, for ``judge: code``.
        harness: fields of an lm-evaluation-harness task.
        plain: fields that replace those of `harness` without a chat template.
        parts: field by which documents fall into parts that draw few-shot examples from among themselves.
    """

    documents: dict[str, Any]
    harness: dict[str, Any]
    judge: Literal["match", "code"] = "match"
    plain: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    parts: str | None = None

    def code_limits(self) -> CodeLimits:
        """Return what one program of this task may use."""
        return CodeLimits(**self.limits)


_LEAST = {"batch_size": 1, "max_length": 1, "count": 1, "limit": 1, "samples": 1, "seconds": 1, "memory_mib": 64}


def load_suite(path: str | Path) -> Suite:
    """Read an evaluation configuration.

    Raises:
        UserError: no such file, malformed YAML, an unknown or missing field.
    """
    path = Path(path)
    content = _read_yaml(path)
    tasks = content.pop("tasks", None)
    _check(content, Suite, str(path), exclude=("folder",))
    if not isinstance(tasks, dict) or not tasks:
        raise UserError(f"{path}: tasks is {tasks!r}: list at least one task by name.")
    specs = {}
    for name, entry in tasks.items():
        where = f"{path}: tasks.{name}"
        entry = {} if entry is None else entry
        if not isinstance(entry, dict):
            raise UserError(f"{where} is {entry!r}: need fields such as definition or stock.")
        _check(entry, TaskSpec, where)
        spec = TaskSpec(**entry)
        if (spec.definition is None) == (spec.stock is None):
            raise UserError(f"{where}: give exactly one of definition (a YAML file) and stock (a harness task).")
        if spec.stock is not None and spec.code:
            raise UserError(f"{where}: a stock task cannot run code here: give a definition with judge: code.")
        if spec.samples > 1 and not spec.temperature:
            raise UserError(f"{where}: {spec.samples} samples without a temperature are the same answer: set one.")
        if spec.temperature is not None and not (_is_number(spec.temperature) and 0 < spec.temperature < math.inf):
            raise UserError(f"{where}: temperature is {spec.temperature!r}: need a number above 0, or null.")
        if spec.stock is not None and (spec.samples > 1 or spec.temperature is not None):
            raise UserError(f"{where}: samples and temperature are for definitions: a stock task has its own decoding.")
        specs[str(name)] = spec
    return Suite(**{"name": path.stem, **content}, tasks=specs, folder=path.resolve().parent)


def load_definition(path: Path) -> Definition:
    """Read a task definition; see `Definition`.

    Raises:
        UserError: no such file, malformed YAML, an unknown or missing field.
    """
    content = _read_yaml(path)
    _check(content, Definition, str(path))
    for name in ("documents", "harness"):
        if not isinstance(content.get(name), dict):
            raise UserError(f"{path}: {name} is {content.get(name)!r}: it is needed, as a mapping.")
    definition = Definition(**content)
    if definition.judge not in ("match", "code"):
        raise unknown(f"{path}: judge", definition.judge, ("match", "code"))
    if not isinstance(definition.limits, dict):
        raise UserError(f"{path}: limits is {definition.limits!r}: need a mapping such as {{seconds: 10}}.")
    _check(definition.limits, CodeLimits, f"{path}: limits")
    slow = definition.limits.get("slow", {})
    if not all(_is_number(value) and 0 < value < math.inf for value in slow.values()):
        raise UserError(f"{path}: limits.slow is {slow!r}: need task_id: seconds.")
    return definition


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Name an existing UTF-8 YAML file.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: need a mapping of fields, got {type(content).__name__}.")
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(content: dict[str, Any], kind: type, where: str, exclude: tuple[str, ...] = ()) -> None:
    known = [f.name for f in fields(kind) if f.name not in exclude]
    for name, value in content.items():
        if name not in known:
            raise unknown(f"{where}: field", name, known)
        if type(value) is int and value < _LEAST.get(name, 0):
            raise UserError(f"{where}: {name} is {value}: need at least {_LEAST.get(name, 0)}.")
    check_types(content, kind, where)

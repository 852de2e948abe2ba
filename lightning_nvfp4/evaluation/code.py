"""pass@k of generated programs: the metric that lm-evaluation-harness takes from a hub, run in our sandbox.

Two forms of document are known: HumanEval's (`prompt`, `entry_point`, `test` with a function ``check``) and MBPP's
(`code`, `test_list`, and where they exist `test_imports`, `test_setup_code` and `test`, the plus tests).
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.rl.rewards import program_source
from lightning_nvfp4.lm.rl.sandbox import Program, SandboxResult, run_many

PASSED = "passed"


@dataclass(frozen=True)
class CodeLimits:
    """What one program may use.

    Attributes:
        seconds: of wall time.
        memory_mib: address space of each of its processes, in MiB.
        slow: `task_id` -> seconds, for documents whose reference solution needs more than `seconds`.
    """

    seconds: int = 5
    memory_mib: int = 1024
    slow: dict[Any, int] = field(default_factory=dict)


def judge_programs(
    responses: Sequence[Sequence[str]],
    documents: Sequence[Mapping[str, Any]],
    *,
    limits: CodeLimits | None = None,
    workers: int = 1,
    allow_unsafe: bool = False,
) -> list[list[str]]:
    """Run every response to each document against its tests.

    Args:
        responses: for each document the generated texts.
        documents: in one of the forms above.
        limits: of one program.
        workers: sandboxes side by side.
        allow_unsafe: run with limits alone where the machine cannot isolate.

    Returns:
        For each document and response `PASSED`, or `failed: ` and the reason.

    Raises:
        UserError: a document in neither form; no isolation on this machine.
    """
    limits = limits or CodeLimits()
    places: dict[int, list[tuple[int, int]]] = {}
    programs: dict[tuple[int, int], Program] = {}
    for row, (texts, document) in enumerate(zip(responses, documents, strict=True)):
        seconds = limits.slow.get(document.get("task_id"), limits.seconds)
        for column, text in enumerate(texts):
            programs[row, column] = _program(document, text)
            places.setdefault(seconds, []).append((row, column))
    packages = ("numpy",) if any("numpy" in program.tests for program in programs.values()) else ()  # the plus tests
    verdicts = [[""] * len(texts) for texts in responses]
    for seconds, chosen in places.items():
        results = run_many(
            [programs[place] for place in chosen],
            timeout=seconds,
            workers=workers,
            packages=packages,
            allow_unsafe=allow_unsafe,
            memory_bytes=limits.memory_mib << 20,
        )
        for (row, column), result in zip(chosen, results, strict=True):
            verdicts[row][column] = _verdict(result)
    return verdicts


def pass_at(k: int) -> Callable[..., float]:
    """Return the metric ``pass_at_<k>`` over the verdicts of `judge_programs`.

    It is the unbiased estimate 1 - C(n - c, k) / C(n, k) from c passes in n responses, averaged over documents
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
    """

    def metric(references: Sequence[Any], predictions: Sequence[Sequence[str]]) -> float:
        return sum(_estimate(verdicts, k) for verdicts in predictions) / len(predictions)

    metric.__name__ = f"pass_at_{k}"
    return metric


def reference_solution(document: Mapping[str, Any]) -> str:
    """Return the response to `document` that its authors hold for right."""
    return document["canonical_solution"] if "entry_point" in document else document["code"]


def _estimate(verdicts: Sequence[str], k: int) -> float:
    n, passed = len(verdicts), sum(verdict == PASSED for verdict in verdicts)
    if n < k:
        raise UserError(f"pass@{k} of {n} responses: draw at least {k} for each document.")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _verdict(result: SandboxResult) -> str:
    return PASSED if result.passed else f"failed: {result.reason}"


def _program(document: Mapping[str, Any], text: str) -> Program:
    if "entry_point" in document:
        entry = document["entry_point"]
        return Program(program_source(document["prompt"], text, entry), document["test"], entry)
    if not document.get("test_list"):
        raise UserError(
            f"document {document.get('task_id')!r} has neither entry_point (HumanEval) nor test_list (MBPP): its "
            "programs cannot be judged."
        )
    entry = _function_under_test(document)
    tests = [
        *document.get("test_imports", ()),
        document.get("test_setup_code", ""),  # uses the program's classes, so it stands behind the program
        document.get("test") or "\n".join(document["test_list"]),
    ]
    source = program_source("", text, entry)
    if hasattr(builtins, entry):  # tests see the interpreter's own builtins, and this one is the program's
        return Program(source, "\n".join([f"from program import {entry}", *tests]))
    # The sandbox calls a function named check as HumanEval does; here it is the one under test.
    return Program(source, "\n".join(tests), None if entry == "check" else entry)


def _function_under_test(document: Mapping[str, Any]) -> str:
    """Return the function that the reference solution defines and the first test calls."""
    defined = {node.name for node in ast.parse(document["code"]).body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(ast.parse(document["test_list"][0])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined:
            return node.func.id
    raise UserError(f"document {document.get('task_id')!r}: its first test calls no function that its code defines.")

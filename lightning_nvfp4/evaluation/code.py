"""pass@1 of generated programs: the metric that lm-evaluation-harness takes from a hub, run in our sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_nvfp4.lm.rl.rewards import program_source
from lightning_nvfp4.lm.rl.sandbox import Program, run_many

PASSED = "passed"


def judge_programs(
    responses: Sequence[Sequence[str]],
    documents: Sequence[Mapping[str, Any]],
    *,
    timeout: float = 5.0,
    workers: int = 1,
    allow_unsafe: bool = False,
) -> list[str]:
    """Run the first response to each document against its tests.

    Args:
        responses: for each document the generated texts.
        documents: with `prompt`, `entry_point` and `test`, which defines `check(candidate)` (HumanEval's form).
        timeout: wall seconds for each program.
        workers: sandboxes side by side.
        allow_unsafe: run with limits alone where the machine cannot isolate.

    Returns:
        For each document `PASSED`, or `failed: ` and the reason.
    """
    programs = [
        Program(program_source(doc["prompt"], texts[0], doc["entry_point"]), doc["test"], doc["entry_point"])
        for texts, doc in zip(responses, documents, strict=True)
    ]
    packages = ("numpy",) if any("numpy" in program.tests for program in programs) else ()  # HumanEval+
    results = run_many(
        programs, timeout=timeout, workers=workers, packages=packages, allow_unsafe=allow_unsafe, memory_bytes=1 << 30
    )
    return [PASSED if result.passed else f"failed: {result.reason}" for result in results]


def pass_at_1(references: Sequence[str], predictions: Sequence[str]) -> float:
    """Return the share of verdicts of `judge_programs` that are `PASSED`."""
    return sum(verdict == PASSED for verdict in predictions) / len(predictions)

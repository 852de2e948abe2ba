"""Judge the reference solutions of the code tasks of a suite: a scorer that fails them is at fault.

    python benchmarks/check_code_tasks.py --data-dir DATA [--config eval/offline.yaml] [--tasks mbpp mbpp_plus]

MBPP+ has a reference solution that computes for a minute. Expected: HumanEval 164/164, HumanEval+ 163/164 (the test of
HumanEval/32 is malformed), MBPP 500/500, MBPP+ 378/378.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

from lightning_nvfp4.evaluation.code import PASSED, judge_programs, reference_solution
from lightning_nvfp4.evaluation.documents import load_documents
from lightning_nvfp4.evaluation.suite import load_definition, load_suite


def main() -> None:
    """Print, for each code task, how many reference solutions pass, and those that do not."""
    parser = argparse.ArgumentParser(description="Judge the reference solutions of a suite's code tasks.")
    parser.add_argument("--config", default=Path(__file__).parents[1] / "eval" / "offline.yaml", type=Path)
    parser.add_argument("--data-dir")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    options = parser.parse_args()
    suite = load_suite(options.config)
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    for name, spec in suite.tasks.items():
        if spec.definition is None or not spec.code or (options.tasks and name not in options.tasks):
            continue
        definition = load_definition(suite.folder / spec.definition)
        source = load_documents(
            definition.documents, name, seed=0, count=None, data_dir=options.data_dir or suite.data_dir
        )
        documents = source["test"]
        start = time.monotonic()
        verdicts = judge_programs(
            [[reference_solution(document)] for document in documents],
            documents,
            limits=definition.code_limits(),
            workers=options.workers,
        )
        passed = sum(verdict == PASSED for (verdict,) in verdicts)
        print(f"{name}: {passed}/{len(documents)}, {time.monotonic() - start:.0f} s", flush=True)
        for document, (verdict,) in zip(documents, verdicts, strict=True):
            if verdict != PASSED:
                print(f"  {document['task_id']}: {verdict}", flush=True)


if __name__ == "__main__":
    main()

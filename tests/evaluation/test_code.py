"""pass@1 scores right programs as right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.code import PASSED, judge_programs, pass_at_1
from lightning_nvfp4.lm.data.embedded import eval_documents
from lightning_nvfp4.lm.rl.sandbox import run_python

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "humaneval"


@pytest.fixture(scope="module", autouse=True)
def isolation() -> None:
    try:
        run_python("pass")
    except UserError as error:
        pytest.skip(f"no namespaces on this machine: {error}")


def test_reference_solutions_of_the_embedded_task() -> None:
    documents = eval_documents("code", 0, 20)
    right = [[document["canonical_solution"]] for document in documents]
    assert judge_programs(right, documents) == [PASSED] * 20
    wrong = judge_programs([["    return None\n"]] * 20, documents)
    assert all(verdict.startswith("failed: AssertionError") for verdict in wrong)
    assert pass_at_1([], [PASSED, *wrong[:3]]) == 0.25


def test_reference_solutions_of_humaneval() -> None:
    path = DATA / "HumanEval.jsonl"
    if not path.is_file():
        pytest.skip("no shared/data/humaneval")
    documents = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    verdicts = judge_programs([[d["canonical_solution"]] for d in documents], documents, timeout=20.0)
    assert {d["task_id"]: v for d, v in zip(documents, verdicts, strict=True) if v != PASSED} == {}
    assert len(verdicts) == 164


def test_reference_solutions_of_some_humaneval_plus() -> None:
    path = DATA / "HumanEvalPlus-OriginFmt.jsonl.gz"
    if not path.is_file():
        pytest.skip("no shared/data/humaneval")
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        documents = [json.loads(line) for line in stream][30:34]
    verdicts = judge_programs([[d["canonical_solution"]] for d in documents], documents, timeout=60.0)
    failed = [d["task_id"] for d, v in zip(documents, verdicts, strict=True) if v != PASSED]
    assert failed == ["HumanEval/32"], "upstream's test of this one is malformed"

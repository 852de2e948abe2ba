"""pass@k scores right programs as right, and draws its prompts from the same bytes as lm-evaluation-harness."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.code import PASSED, CodeLimits, judge_programs, pass_at, reference_solution
from lightning_nvfp4.evaluation.documents import Rows, load_documents
from lightning_nvfp4.evaluation.suite import load_definition, load_suite
from lightning_nvfp4.lm.data.embedded import eval_documents
from lightning_nvfp4.lm.rl.sandbox import run_python

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"

ADD = {
    "task_id": 1,
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 2) == 2"],
}


@pytest.fixture(scope="module")
def isolation() -> None:
    try:
        run_python("pass")
    except UserError as error:
        pytest.skip(f"no namespaces on this machine: {error}")


def documents_of(task: str) -> tuple[dict[str, Rows], CodeLimits]:
    if not DATA.is_dir():
        pytest.skip(f"no data sets at {DATA}")
    spec = load_suite(ROOT / "eval" / "offline.yaml").tasks[task]
    definition = load_definition(ROOT / "eval" / str(spec.definition))
    return load_documents(definition.documents, task, seed=0, count=None, data_dir=DATA), definition.code_limits()


def failures(documents: Sequence[dict[str, Any]], limits: CodeLimits) -> list[Any]:
    verdicts = judge_programs([[reference_solution(d)] for d in documents], documents, limits=limits)
    return [d["task_id"] for d, (verdict,) in zip(documents, verdicts, strict=True) if verdict != PASSED]


@pytest.mark.usefixtures("isolation")
def test_reference_solutions_of_the_embedded_task() -> None:
    documents = eval_documents("code", 0, 20)
    assert failures(documents, CodeLimits()) == []
    wrong = judge_programs([["    return None\n"]] * 20, documents)
    assert all(verdict.startswith("failed: AssertionError") for (verdict,) in wrong)


# Slices that hold the irregular documents, without those whose references compute for seconds to a minute:
# benchmarks/check_code_tasks.py runs the full sets.
@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize(
    ("task", "count", "chosen", "malformed"),
    [
        ("humaneval", 164, slice(None), []),
        ("humaneval_plus", 164, slice(30, 34), ["HumanEval/32"]),
        ("mbpp", 500, slice(None, None, 4), []),
        ("mbpp_plus", 378, slice(None, None, 16), []),
    ],
)
def test_reference_solutions(task: str, count: int, chosen: slice, malformed: list[str]) -> None:
    splits, limits = documents_of(task)
    assert len(splits["test"]) == count
    irregular = {"mbpp": (56, 126, 349, 367), "mbpp_plus": (56, 126)}.get(task, ())
    documents = splits["test"][chosen] + [d for d in splits["test"] if d["task_id"] in irregular]
    heavy = (123, 255, 271, 392, 589, 599, 603)
    assert failures([d for d in documents if d["task_id"] not in heavy], limits) == malformed


@pytest.mark.usefixtures("isolation")
def test_plus_tests_are_run() -> None:
    plus = {**ADD, "test": "import numpy as np\nassert np.isclose(add(-1, 1), 0)"}
    lazy = "def add(a, b):\n    return abs(a) + b"
    assert judge_programs([[lazy]], [ADD]) == [[PASSED]]
    assert judge_programs([[lazy, ADD["code"]]], [plus]) == [["failed: AssertionError: ", PASSED]]


@pytest.mark.usefixtures("isolation")
def test_mbpp_programs_as_models_write_them() -> None:
    tree = {
        "task_id": 2,
        "code": "class Node:\n    value = 1\ndef total(node):\n    return node.value",
        "test_setup_code": "root = Node()",
        "test_list": ["assert total(root) == 1"],
    }
    sums = {"task_id": 3, "code": "def sum(a, b):\n    return a + b", "test_list": ["assert sum(1, 2) == 3"]}
    check = {"task_id": 4, "code": "def check(a):\n    return a > 0", "test_list": ["assert check(2) == True"]}
    fenced = f"Here it is:\n```python\n{ADD['code']}\n```\nDone."
    cheat = "class Yes(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Yes()"
    verdicts = judge_programs(
        [
            [fenced, cheat, "import sys\nsys.exit(0)", "def add(a, b):\n  while True: pass"],
            *([d["code"]] for d in (tree, sums, check)),
        ],
        [ADD, tree, sums, check],
        limits=CodeLimits(seconds=60, slow={1: 2}),
    )
    assert verdicts[0][0] == PASSED
    assert [v.split(":")[1] for v in verdicts[0][1:]] == [" TypeError", " SystemExit", " time limit of 2 s"]
    assert verdicts[1:] == [[PASSED]] * 3


@pytest.mark.parametrize(("n", "c", "k"), [(1, 1, 1), (4, 1, 1), (5, 2, 3), (10, 0, 10), (10, 9, 2)])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(n: int, c: int, k: int) -> None:
    verdicts = [PASSED] * c + ["failed: x"] * (n - c)
    draws = list(itertools.combinations(verdicts, k))
    assert pass_at(k)([], [verdicts]) == pytest.approx(sum(PASSED in draw for draw in draws) / len(draws), abs=1e-12)
    with pytest.raises(UserError, match=f"pass@{n + 1} of {n} responses"):
        pass_at(n + 1)([], [verdicts])


def test_a_document_of_no_known_form_is_refused() -> None:
    with pytest.raises(UserError, match="document 7 has neither entry_point"):
        judge_programs([["x"]], [{"task_id": 7}])
    with pytest.raises(UserError, match="document 1: its first test calls no function"):
        judge_programs([["x"]], [{**ADD, "code": "def other(): pass"}])


@pytest.mark.parametrize("task", ["humaneval", "humaneval_plus", "mbpp", "mbpp_plus"])
def test_prompts_are_those_of_the_harness(task: str) -> None:
    """Its own definitions cannot be loaded without a hub, so they are read as text."""
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    from lightning_nvfp4.evaluation.harness import own_tasks

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    splits, _ = documents_of(task)
    folder = Path(lm_eval.__file__).parent / "tasks" / task.removesuffix("_plus")
    stock: dict[str, Any] = {}
    for name in dict.fromkeys([task.removesuffix("_plus"), task]):
        stock |= yaml.load((folder / f"{name}.yaml").read_text(), Loader)
    generation, shots = stock["generation_kwargs"], stock["num_fewshot"]
    stock = {k: stock[k] for k in ("doc_to_text", "doc_to_target", "target_delimiter", "output_type") if k in stock}
    if shots:
        tree = ast.parse((folder / "utils.py").read_text())
        (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "list_fewshot_samples"]
        assert isinstance(found.body[0], ast.Return) and found.body[0].value is not None
        stock["fewshot_config"] = {"sampler": "first_n", "samples": ast.literal_eval(found.body[0].value)}
    loaded = datasets.DatasetDict({"test": datasets.Dataset.from_list(splits["test"])})
    theirs = ConfigurableTask(
        config={**stock, "task": task, "custom_dataset": lambda **_: loaded, "test_split": "test"}
    )
    spec = load_suite(ROOT / "eval" / "offline.yaml").tasks[task]
    for name in (str(spec.definition), str(spec.definition).replace("_files", "_hub")):
        (ours,) = own_tasks(task, spec, load_definition(ROOT / "eval" / name), splits, chat=False, judge=None).values()
        assert ours.get_config("num_fewshot") == shots
        assert generation.items() <= ours.get_config("generation_kwargs").items()
        for document in splits["test"][::20]:
            prompt = ours.fewshot_context(document, shots)
            assert prompt == theirs.fewshot_context(document, shots)
            assert len(prompt) > 100

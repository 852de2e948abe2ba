"""The needle stands where the grid says, once, among distractors of its own form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.evaluation.needle import needle_documents
from lightning_nvfp4.evaluation.suite import load_definition, load_suite

ROOT = Path(__file__).parents[2]
GRID = {"words": [100, 400], "depths": [0, 50, 100], "distractors": 3}


def test_grid() -> None:
    documents = needle_documents(GRID, "needle", seed=0, count=4)
    assert len(documents) == 2 * 3 * 4 and len({d["cell"] for d in documents}) == 6
    for document in documents:
        length, depth = map(int, re.findall(r"\d+", document["cell"]))
        sentences = re.findall(r"[^.]+\.", document["text"])
        needles = [s for s in sentences if "special number" in s]
        assert len(needles) == 4 and sum(document["answer"] in s for s in needles) == 1
        (place,) = [i for i, s in enumerate(sentences) if f"{document['city']} is {document['answer']}." in s]
        assert place == round((len(sentences) - 1) * depth / 100)
        plain = [s for s in sentences if s not in needles]
        assert length <= sum(len(s.split()) for s in plain) < length + 12


def test_documents_are_a_function_of_the_seed() -> None:
    first, again, other = (needle_documents(GRID, "needle", seed=seed, count=2) for seed in (0, 0, 1))
    assert first == again
    assert {d["text"] for d in first}.isdisjoint(d["text"] for d in other)
    assert needle_documents({**GRID, "words": [400]}, "needle", seed=0, count=1) == [
        d for d in needle_documents(GRID, "needle", seed=0, count=1) if d["cell"].startswith("400 ")
    ]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (5, "needle is 5: need a mapping"),
        ({"word": [100], "depths": [0]}, "Did you mean 'words'"),
        ({"words": [100], "depths": [101]}, r"needle.depths is \[101\]"),
        ({"words": 100, "depths": [0]}, "needle.words is 100"),
        ({"words": [100], "depths": [0], "distractors": 20}, "needle.distractors is 20"),
    ],
)
def test_bad_grids_are_named(grid: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        needle_documents(grid, "task", seed=0, count=1)


def test_prompt_and_answer() -> None:
    from lightning_nvfp4.evaluation.harness import own_tasks

    suite = load_suite(ROOT / "eval" / "long_context.yaml")
    spec = suite.tasks["needle"]
    definition = load_definition(suite.folder / str(spec.definition))
    rows = needle_documents(definition.documents["needle"], "needle", seed=0, count=1)
    tasks = own_tasks("needle", spec, definition, {"test": rows}, chat=False, judge=None)
    assert len(tasks) == 20
    for row, (cell, task) in zip(rows, tasks.items(), strict=True):
        task.build_all_requests(limit=1, rank=0, world_size=1)
        (request,) = task.instances
        assert row["cell"] == cell and request.args[0].endswith(f"special number of {row['city']} is")
        request.resps = [f" {row['answer']}. The end"]
        task.apply_filters()
        assert task.process_results(row, [request.filtered_resps["number"]]) == {"exact_match": 1.0}

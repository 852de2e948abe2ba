"""The suite on files asks what lm-evaluation-harness's own tasks ask, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_nvfp4.evaluation.articles import read_articles
from lightning_nvfp4.evaluation.documents import Rows, load_documents
from lightning_nvfp4.evaluation.suite import load_definition, load_suite

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
SUITE = load_suite(ROOT / "eval" / "offline.yaml")


@cache
def documents(task: str) -> dict[str, Rows]:
    if not DATA.is_dir():
        pytest.skip(f"no data sets at {DATA}")
    definition = load_definition(ROOT / "eval" / str(SUITE.tasks[task].definition))
    return load_documents(definition.documents, task, seed=0, count=None, data_dir=DATA)


@cache
def tasks(task: str) -> dict[str, Any]:
    from lightning_nvfp4.evaluation.harness import own_tasks

    spec = SUITE.tasks[task]
    definition = load_definition(ROOT / "eval" / str(spec.definition))
    return own_tasks(task, spec, definition, documents(task), chat=False, judge=None)


def stock(name: str, dataset: dict[str, Rows], **changes: Any) -> Any:
    """The harness's own task `name`, its functions included, over `dataset` instead of a hub's."""
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / f"{name}.yaml", resolve_func=True)
    loaded = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in dataset.items()})
    for field in ("dataset_path", "dataset_name", "tag", "task_alias", "training_split", "validation_split"):
        config.pop(field, None)
    return ConfigurableTask(config={**config, **changes, "custom_dataset": lambda **_: loaded})


def prompts(task: Any, count: int) -> Iterator[tuple[Any, ...]]:
    """What a task asks about its first documents: the arguments of its requests."""
    task.set_fewshot_seed(SUITE.fewshot_seed)
    task.build_all_requests(limit=count, rank=0, world_size=1)
    assert task.instances
    for request in task.instances:
        yield request.request_type, request.args, request.repeats


def test_gsm8k() -> None:
    (ours,) = tasks("gsm8k").values()
    splits = documents("gsm8k")
    theirs = stock("gsm8k/gsm8k", {"train": splits["fewshot"], "test": splits["test"]})
    assert list(prompts(ours, 20)) == list(prompts(theirs, 20))
    for field in ("metric_list", "filter_list", "num_fewshot"):
        assert ours.get_config(field) == theirs.get_config(field)


@pytest.mark.parametrize(("task", "count"), [("mmlu", 2), ("mmlu_pro", 1)])
def test_tasks_of_subjects(task: str, count: int) -> None:
    splits, parts = documents(task), tasks(task)
    assert len(parts) == {"mmlu": 57, "mmlu_pro": 14}[task]
    field = {"mmlu": "subject", "mmlu_pro": "category"}[task]
    folder = {"mmlu": "mmlu/default", "mmlu_pro": "mmlu_pro"}[task]
    names = {"test": "test", "fewshot": "dev" if task == "mmlu" else "validation"}
    for part, ours in parts.items():
        rows = {names[split]: [row for row in splits[split] if row[field] == part] for split in splits}
        theirs = stock(f"{folder}/{task}_{part.replace(' ', '_')}", rows, num_fewshot=5)
        assert list(prompts(ours, count)) == list(prompts(theirs, count))
        for name in ("metric_list", "filter_list", "num_fewshot"):
            assert ours.get_config(name) == theirs.get_config(name)


def test_wikitext() -> None:
    (ours,) = tasks("wikitext").values()
    theirs = stock("wikitext/wikitext", {"test": [{"page": row["page"]} for row in documents("wikitext")["test"]]})
    assert list(prompts(ours, 60)) == list(prompts(theirs, 60))
    for row in documents("wikitext")["test"]:
        assert ours.process_results(row, [-5.0]) == theirs.process_results(row, [-5.0])
    assert len(documents("wikitext")["test"]) == 60, "as its authors count its articles"
    assert len(read_articles(DATA / "wikitext2" / "wiki.valid.txt.gz")) == 60


def test_every_file_of_the_suite_is_read_from_the_data_folder() -> None:
    for task in SUITE.tasks:
        assert documents(task)["test"], os.fspath(DATA)

"""Laws of the embedded data: pure functions, disjoint held-out parts, mixture shares, references that verify."""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data import stdlib_text
from lightning_nvfp4.lm.data.embedded import (
    DOCUMENTS,
    MIXTURES,
    RL_SHARES,
    SFT_SHARES,
    STYLE_NOISE,
    eval_documents,
    pretrain_documents,
    rl_prompts,
    sft_conversations,
)

EVALUATIONS = ("word", "choice", "choice_heldout", "code")


@pytest.fixture(scope="module")
def documents() -> dict[str, list[str]]:
    return {stage: list(pretrain_documents(stage, 0)) for stage in DOCUMENTS}


def _questions(task: str, seed: int = 0, count: int = 300) -> list[str]:
    return [d["prompt" if task == "code" else "question"] for d in eval_documents(task, seed, count)]


def _kind(text: str) -> str:
    """The task that a user turn belongs to."""
    if text.startswith("def "):
        return "code"
    return "choice" if text.startswith("What is the ") else "word"


@pytest.mark.parametrize("stage", list(DOCUMENTS))
def test_documents_are_a_pure_function_of_stage_and_seed(stage: str, documents: dict[str, list[str]]) -> None:
    state = random.getstate()
    again = list(itertools.islice(pretrain_documents(stage, 0), 300))
    assert random.getstate() == state
    assert again == documents[stage][:300] and len(documents[stage]) == DOCUMENTS[stage]
    assert list(itertools.islice(pretrain_documents(stage, 1), 50)) != again[:50]
    assert all(d.strip() for d in documents[stage])


@pytest.mark.parametrize("function", [sft_conversations, rl_prompts, lambda s, n: eval_documents("word", s, n)])
def test_rows_are_a_pure_function_of_seed_and_a_larger_count_only_appends(function: Any) -> None:
    state = random.getstate()
    rows = function(3, 200)
    assert rows == function(3, 200) and len(rows) == 200
    assert random.getstate() == state
    assert function(4, 200) != rows
    if function is not rl_prompts and function is not sft_conversations:
        assert function(3, 100) == rows[:100]


def test_ten_thousand_conversations_take_less_than_two_seconds() -> None:
    start = time.process_time()
    sft_conversations(0, 10_000)
    assert time.process_time() - start < 2


@pytest.fixture(scope="module")
def training(documents: dict[str, list[str]]) -> set[str]:
    """Every user turn of SFT and RL, and every line and pair of lines of the pretraining text."""
    found = {row["messages"][0]["content"] for row in sft_conversations(0, 10_000) + rl_prompts(0, 10_000)}
    for document in itertools.chain(documents["pretrain"], documents["decay"]):
        lines = [line.removeprefix("Question: ") for line in document.split("\n")]
        found.update(lines)
        found.update(f"{first}\n{second}\n" for first, second in itertools.pairwise(lines))
    return found


@pytest.mark.parametrize("task", EVALUATIONS)
def test_no_evaluation_question_is_in_any_training_data(task: str, training: set[str]) -> None:
    assert not training & {*_questions(task, seed=0), *_questions(task, seed=11)}


def test_training_questions_are_in_the_pretraining_text_so_that_the_last_law_can_fail(training: set[str]) -> None:
    others = {row["messages"][0]["content"] for row in sft_conversations(1, 2000)}
    found = Counter(_kind(question) for question in others & training)
    assert min(found[kind] for kind in SFT_SHARES) > 20


def test_operand_pairs_of_evaluation_occur_as_sums_and_stories_but_in_no_solved_problem(
    documents: dict[str, list[str]], training: set[str]
) -> None:
    story = r"has (\d) \w+\. \w+ (gets|loses) (\d)\."
    problems = "\n".join(turn for turn in training if "How many" in turn)
    solved = set(re.findall(rf"{story} (?:How|Then)", problems))
    pages = "\n".join(documents["decay"])
    told = set(re.findall(rf"{story} \d[+-]\d\n", pages))
    summed = {
        (a, "gets" if sign == "+" else "loses", b) for a, sign, b in re.findall(r"^(\d)([+-])(\d)=\d", pages, re.M)
    }
    asked = {tuple(re.findall(story, question)[0]) for question in _questions("word")}
    assert len(asked) == 19 and len(solved) == 53
    assert not asked & solved
    assert asked <= told and asked <= summed


@pytest.mark.parametrize("task", EVALUATIONS)
def test_evaluation_items_are_distinct_and_every_seed_draws_its_own(task: str) -> None:
    questions = _questions(task)
    assert len(set(questions)) == len(questions) == 300
    assert _questions(task, seed=1) != questions


def test_heldout_facts_are_stated_in_pretraining_and_never_asked_in_sft_or_rl(
    documents: dict[str, list[str]],
) -> None:
    asked = {q.split("?")[0] for q in _questions("choice_heldout")}
    seen = {q.split("?")[0] for q in _questions("choice")}
    trained = {r["messages"][0]["content"].split("?")[0] for r in sft_conversations(0, 10_000) + rl_prompts(0, 10_000)}
    assert asked and not asked & trained
    assert seen <= trained
    pages = "\n".join(documents["pretrain"][:3000])
    for question in asked:
        statement = question.replace("What is the", "The")
        assert f"{statement} is " in pages
        assert f"{question}?" not in pages


def test_validation_shares_no_document_and_no_module_with_training(documents: dict[str, list[str]]) -> None:
    trained = set(documents["pretrain"]) | set(documents["decay"])
    assert not set(documents["validation"]) & trained
    assert not set(stdlib_text.TRAIN_MODULES) & set(stdlib_text.VALIDATION_MODULES)
    assert not set(itertools.islice(pretrain_documents("validation", 1), 100)) & trained


@pytest.mark.parametrize("stage", list(DOCUMENTS))
def test_the_text_has_the_shares_of_its_mixture(stage: str, documents: dict[str, list[str]]) -> None:
    mixture = MIXTURES["pretrain" if stage == "validation" else stage]
    assert sum(mixture.values()) == pytest.approx(1)
    library = set(stdlib_text.stdlib_documents("validation" if stage == "validation" else "train"))
    characters = Counter({True: 0, False: 0})
    for document in documents[stage]:
        characters[document in library] += len(document)
    assert characters[True] / characters.total() == pytest.approx(mixture["stdlib"], abs=0.04)


def test_decay_has_more_tasks_and_less_library_than_pretrain() -> None:
    assert MIXTURES["decay"]["stdlib"] < MIXTURES["pretrain"]["stdlib"]
    assert all(MIXTURES["decay"][task] > MIXTURES["pretrain"][task] for task in ("word", "choice", "code"))


def test_sft_and_rl_have_their_task_shares_and_sft_its_style_noise() -> None:
    rows = sft_conversations(0, 4000)
    for shares, turns in ((SFT_SHARES, rows), (RL_SHARES, rl_prompts(0, 4000))):
        counts = Counter(_kind(row["messages"][0]["content"]) for row in turns)
        assert {k: counts[k] / 4000 for k in shares} == pytest.approx(shares, abs=0.03)
    noisy = [("print(" in a) or a.startswith("It is ") for a in _answers(rows, ("code", "choice"))]
    assert sum(noisy) / len(noisy) == pytest.approx(STYLE_NOISE, abs=0.04)
    words = _answers(rows, ("word",))
    sentences = sum("####" not in a for a in words)
    bare = sum(a.startswith("####") for a in words)
    assert (sentences + bare) / len(words) == pytest.approx(STYLE_NOISE, abs=0.04)
    assert sentences and bare


def _answers(rows: list[dict[str, Any]], kinds: tuple[str, ...]) -> list[str]:
    return [r["messages"][1]["content"] for r in rows if _kind(r["messages"][0]["content"]) in kinds]


def test_rl_references_are_those_of_the_question() -> None:
    for row in rl_prompts(0, 300):
        content, reference = row["messages"][0]["content"], row["reference"]
        assert [m["role"] for m in row["messages"]] == ["user"]
        if _kind(content) == "code":
            assert set(reference) == {"kind", "entry_point", "tests", "prompt"} and reference["prompt"] == content
            assert reference["kind"] == "code" and f"def {reference['entry_point']}(" in content
            compile(content + "    return 0\n" + reference["tests"], "reference", "exec")
        else:
            assert set(reference) == {"kind", "answer"} and reference["kind"] == "exact"
            assert _kind(content) == "word" or reference["answer"] in content


def test_evaluation_rows_have_the_form_of_the_public_benchmarks() -> None:
    for row in eval_documents("word", 0, 50):
        assert set(row) == {"question", "answer", "target"} and row["answer"].endswith(f"#### {row['target']}")
    for task in ("choice", "choice_heldout"):
        for row in eval_documents(task, 0, 50):
            assert set(row) == {"question", "choices", "answer"} and len(row["choices"]) == 4
            assert row["choices"][row["answer"]] in row["question"]
    for row in eval_documents("code", 0, 50):
        assert set(row) == {"prompt", "entry_point", "test", "canonical_solution"}
        namespace: dict[str, Any] = {}
        exec(row["prompt"] + row["canonical_solution"] + row["test"], namespace)
        namespace["check"](namespace[row["entry_point"]])


def test_unknown_stage_and_task_are_named_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="'pretrian' is unknown. Did you mean 'pretrain'"):
        next(pretrain_documents("pretrian", 0))
    with pytest.raises(UserError, match="'cod' is unknown. Did you mean 'code'"):
        eval_documents("cod", 0, 1)


def test_library_documents_are_pieces_of_this_pythons_own_source() -> None:
    documents = stdlib_text.stdlib_documents("train")
    assert len(documents) > 4000 and sum(map(len, documents)) > 2_000_000
    assert all(120 <= len(d) <= stdlib_text.MAX_CHARACTERS for d in documents)
    heapq = (Path(random.__file__).parent / "heapq.py").read_text(encoding="utf-8")
    line = max(heapq.splitlines(), key=len)
    assert any(line in d for d in stdlib_text.stdlib_documents("validation"))
    assert not any(line in d for d in documents)
    assert all("site-packages" not in m for m in stdlib_text.TRAIN_MODULES)


def test_a_python_without_source_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="data.path='embedded' needs the source"):
        stdlib_text.stdlib_documents.__wrapped__("train")


def test_most_modules_exist_in_this_python() -> None:
    root = Path(random.__file__).parent
    modules = stdlib_text.TRAIN_MODULES + stdlib_text.VALIDATION_MODULES
    assert len(set(modules)) == len(modules)
    missing = [m for m in modules if not (root / f"{m}.py").is_file()]
    assert len(missing) <= (0 if sys.version_info < (3, 13) else len(modules) // 10)

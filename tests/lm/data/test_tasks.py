"""Laws of the generated tasks: canonical answers verify, other styles do not, held-out items stay held out."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from lightning_nvfp4.lm.data.tasks import FACTS, RELATIONS, Task, draw_choice, draw_code, draw_word, held_out

DRAWS = {"word": draw_word, "choice": draw_choice, "code": draw_code}


def _many(kind: str, split: Any, count: int = 400) -> list[Task]:
    rng = Random(f"test {kind} {split}")
    return [DRAWS[kind](rng, split) for _ in range(count)]


def _passes(task: Task, body: str) -> bool:
    namespace: dict[str, Any] = {}
    exec(f"{task.question}{body}\n{task.test}", namespace)
    try:
        namespace["check"](namespace[task.entry_point])
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("split", ["train", "eval"])
def test_word_answers_are_true_equations_that_use_the_numbers_of_the_question_in_order(split: str) -> None:
    for task in _many("word", split):
        *working, last = task.answer.split("\n")
        assert last == f"#### {task.target}"
        for line in working:
            left, right = line.split("=")
            assert eval(left) == int(right) >= 0
        said = [int(n) for n in re.findall(r"\d+", task.question)]
        used = [int(n) for line in working for n in re.findall(r"\d+", line.split("=")[0])]
        results = [int(line.split("=")[1]) for line in working]
        assert used == [said[0], said[1], *(n for pair in zip(results, said[2:], strict=False) for n in pair)]


def test_word_styles_say_the_same_number() -> None:
    for task in _many("word", "train", 50):
        sentence, bare = task.styles
        assert "####" not in sentence and re.findall(r"\d+", sentence) == [task.target]
        assert bare == f"#### {task.target}"


def test_word_evaluation_pairs_never_occur_in_training_problems() -> None:
    def pairs(split: str) -> set[str]:
        return {t.answer.split("=")[0] for t in _many("word", split, 4000)}

    train, evaluation = pairs("train"), pairs("eval")
    assert not train & evaluation
    assert len(evaluation) == 19 and len(train) == 36 + 36 - 19


@pytest.mark.parametrize("split", ["train", "eval", "heldout"])
def test_choice_offers_the_true_value_once_among_four(split: str) -> None:
    truth = {(f.land, f.relation): f for f in FACTS}
    for task in _many("choice", split):
        relation, land, options = re.fullmatch(r"What is the (\w+) of (\w+)\? Options: (.*)\.", task.question).groups()  # type: ignore[union-attr]
        fact = truth[land, relation]
        assert task.answer == task.target == fact.value
        assert task.choices == tuple(options.split(", ")) and len(set(task.choices)) == 4
        assert task.choices.count(fact.value) == 1 and set(task.choices) <= set(RELATIONS[relation])
        assert fact.seen_in_sft is (split != "heldout")


def test_choice_splits_are_disjoint_and_the_right_position_is_uniform() -> None:
    train, evaluation = _many("choice", "train", 4000), _many("choice", "eval", 1000)
    assert not {t.question for t in train} & {t.question for t in evaluation}
    counts = [sum(t.choices[i] == t.target for t in train) for i in range(4)]
    assert min(counts) > 850 and max(counts) < 1150  # 1000 expected, five standard deviations


@pytest.mark.parametrize("split", ["train", "eval"])
def test_code_answers_pass_their_tests_and_the_print_style_fails(split: str) -> None:
    for task in _many("code", split):
        assert _passes(task, task.answer)
        assert not _passes(task, "    return 0")
    assert not _passes(task, "    pass")


def test_code_tests_tell_every_wrong_constant_and_sign_apart() -> None:
    for task in _many("code", "train", 100):
        for sign in "+-*":
            for constant in range(2, 10):
                wrong = re.sub(r"[+*-] \d$", f"{sign} {constant}", task.answer)
                argument = task.question.split("(")[1].split(")")[0]
                same = all(eval(wrong[10:], {argument: x}) == eval(task.target, {argument: x}) for x in range(-5, 30))
                assert _passes(task, wrong) is same


def test_printing_is_not_returning(capsys: pytest.CaptureFixture[str]) -> None:
    task = _many("code", "train", 1)[0]
    assert task.styles[0] == task.answer.replace("return ", "print(") + ")"
    assert not _passes(task, task.styles[0])
    assert capsys.readouterr().out


def test_code_combinations_of_evaluation_never_occur_in_training() -> None:
    def combinations(split: str) -> set[str]:
        tasks = _many("code", split, 4000)
        docstrings = [t.question.split('"""')[1] for t in tasks]
        return {re.sub(r"^Return \w+ |\w+(?=\()", "", d) for d in docstrings}

    train, evaluation = combinations("train"), combinations("eval")
    assert len(train) > 500 and len(evaluation) > 100
    assert not train & evaluation


def test_held_out_is_a_fixed_fraction_of_the_keys() -> None:
    assert 150 < sum(held_out(str(i), 5) for i in range(1000)) < 250
    assert [held_out(f"1+{i}", 7) for i in range(1, 10)] == [held_out(f"1+{i}", 7) for i in range(1, 10)]

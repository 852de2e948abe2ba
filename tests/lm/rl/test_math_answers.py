"""Laws of the GSM8K reward and of the format reward."""

from __future__ import annotations

import importlib.util

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.rl import math_answers
from lightning_nvfp4.lm.rl.rewards import RewardOptions, score, score_many

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)

ANSWERS = [
    ("6 * 7 = 42\n#### 42", "42", 1),
    ("#### $1,000.00", "1000", 1),
    ("half of it\n#### 1/2", "0.5", 1),
    ("so the answer is \\boxed{42}.", "42", 1),
    ("He buys 3 and has 42 apples in total.", "42", 1),
    ("#### 41 or 42\n#### 42", "42", 1),
    ("42 apples\n#### 41", "42", 0),
    ("#### 4.2", "42", 0),
    ("#### -42", "42", 0),
    ("forty-two", "42", 0),
    ("", "42", 0),
    ("#### 3e", "42", 0),
]


@needs_math_verify
def test_answers_are_compared_as_numbers() -> None:
    references = [{"kind": "gsm8k", "answer": answer} for _, answer, _ in ANSWERS]
    rewards = score_many([text for text, _, _ in ANSWERS], references)
    assert dict(zip((text for text, _, _ in ANSWERS), rewards, strict=True)) == {t: float(r) for t, _, r in ANSWERS}


@needs_math_verify
def test_an_answer_that_takes_for_ever_is_wrong_and_harms_no_other() -> None:
    right = ("#### 42", "42")
    assert math_answers.equal_answers([right], 30.0) == [True]
    process = math_answers._process
    assert process is not None
    process.send_signal(19)  # SIGSTOP: it answers nothing more
    assert math_answers.equal_answers([right], 0.5) == [False]
    assert math_answers._process is None
    assert math_answers.equal_answers([right, ("#### 41", "42")], 30.0) == [True, False]


def test_without_math_verify_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    math_answers._stop()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lightning-nvfp4\[rl\]'"):
        score("#### 42", {"kind": "gsm8k", "answer": "42"})


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("6 * 7 is 42\n#### 42", 1),
        ("a\nb\n#### $42\n", 1),
        ("#### 42", 0),
        ("so\n#### 42\n#### 43", 0),
        ("so\n#### 42\nand more", 0),
        ("so #### 42", 0),
        ("so\n####", 0),
    ],
)
def test_the_default_format_is_working_then_one_answer(text: str, reward: float) -> None:
    assert score(text, {"kind": "format"}) == reward


def test_another_format() -> None:
    assert score("<a>1</a>", {"kind": "format"}, options=RewardOptions(format="<a>.*</a>")) == 1

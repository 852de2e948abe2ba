"""What a verifiable reward accepts."""

from __future__ import annotations

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.embedded import eval_documents, rl_prompts
from lightning_nvfp4.lm.data.tasks import draw_choice, draw_code, draw_word
from lightning_nvfp4.lm.rl.rewards import RewardOptions, program_source, register_reward, score, score_many
from lightning_nvfp4.lm.rl.sandbox import run_python


def isolated() -> bool:
    try:
        run_python("pass")
    except UserError:
        return False
    return True


ISOLATED = isolated()
needs_sandbox = pytest.mark.skipif(not ISOLATED, reason="no namespaces on this machine")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("3+4=7\n#### 7", "7", 1.0),
        ("#### 6\n#### 7", "7", 1.0),
        ("#### 7\n#### 6", "7", 0.0),
        ("7", "7", 0.0),
        ("#### 17", "7", 0.0),
        ("#### 7 apples", "7", 0.0),
        ("#### $1,234.", "1234", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        (" wolf \n", "wolf", 1.0),
        ("It is wolf.", "wolf", 0.0),
        ("#### wolf", "wolf", 0.0),
        ("", "wolf", 0.0),
        ("", "7", 0.0),
    ],
)
def test_exact(completion: str, answer: str, reward: float) -> None:
    assert score(completion, {"kind": "exact", "answer": answer}) == reward


PROMPT = 'import math\n\ndef f(x):\n    """Return x plus 1."""\n'
CODE = {"kind": "code", "entry_point": "f", "tests": "def check(c):\n    assert c(1) == 2\n", "prompt": PROMPT}


@needs_sandbox
@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("    return x + 1", 1.0),
        ("return x + 1", 1.0),
        ("    y = x\n    return y + 1\n", 1.0),
        ("y = x\n    return y + 1\n", 1.0),
        ("def f(x):\n    return math.floor(x) + 1\n", 1.0),
        ("Here it is:\n```python\ndef f(x):\n    return x + 1\n```\nDone.", 1.0),
        ("```\n    return x + 1\n```", 1.0),
        ("    print(x + 1)", 0.0),
        ("    return x", 0.0),
        ("", 0.0),
        ("    raise SystemExit(0)", 0.0),
        ("    import os; os._exit(0)", 0.0),
        ("def g(x):\n    return x + 1\n", 0.0),
    ],
)
def test_code(completion: str, reward: float) -> None:
    assert score(completion, CODE) == reward


@needs_sandbox
def test_canonical_answers_pass_and_other_styles_do_not() -> None:
    from random import Random

    rng = Random(0)
    completions, references, expected = [], [], []
    for draw in (draw_word, draw_choice, draw_code):
        for _ in range(5):
            task = draw(rng, "train")
            reference = {"kind": "exact", "answer": task.target}
            if task.test:
                reference = {"kind": "code", "entry_point": task.entry_point, "tests": task.test}
                reference["prompt"] = task.question
            accepted = [text for text in task.styles if text.startswith("####")]
            for text in (task.answer, *task.styles):
                completions.append(text)
                references.append(reference)
                expected.append(float(text == task.answer or text in accepted))
    assert score_many(completions, references) == expected
    assert {0.0, 1.0} == set(expected)


@needs_sandbox
def test_every_reference_of_the_embedded_prompts_can_be_scored() -> None:
    rows = rl_prompts(0, 24)
    assert score_many(["nothing"] * 24, [row["reference"] for row in rows]) == [0.0] * 24
    documents = eval_documents("code", 0, 6)
    references = [{"kind": "code", "tests": d["test"], **d} for d in documents]
    for reference in references:
        reference["kind"] = "code"
    assert score_many([d["canonical_solution"] for d in documents], references) == [1.0] * 6


def test_kinds_are_scored_together_and_keep_their_places() -> None:
    calls = []

    @register_reward("length")
    def length(completions, references, options):
        calls.append(len(completions))
        return [float(len(text)) for text in completions]

    references = [{"kind": "length"}, {"kind": "exact", "answer": "b"}, {"kind": "length"}]
    assert score_many(["aaa", "b", "cc"], references, options=RewardOptions()) == [3.0, 1.0, 2.0]
    assert calls == [2]


def test_a_whole_function_keeps_what_stands_before_the_stub() -> None:
    source = program_source(PROMPT, "def f(x):\n    return 0\n", "f")
    assert source.startswith("import math") and source.count("def f") == 1


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(UserError, match="Did you mean 'exact'"):
        score("", {"kind": "exat"})
    with pytest.raises(UserError, match="'answer'"):
        score("", {"kind": "exact"})
    with pytest.raises(UserError, match="1 completions for 2"):
        score_many([""], [{}, {}])

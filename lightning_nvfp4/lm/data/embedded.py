"""The data that needs no files: text for pretraining, conversations for SFT, prompts for RL, items for evaluation.

Real text comes from `stdlib_text`, generated tasks from `tasks`, which says what is held out and what a verifier
accepts. Every function is a pure function of its arguments; randomness is a local generator seeded by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.data.stdlib_text import stdlib_documents
from lightning_nvfp4.lm.data.tasks import (
    FACTS,
    PEOPLE,
    THINGS,
    Split,
    Task,
    draw_choice,
    draw_code,
    draw_step,
    draw_word,
    held_out,
    tell,
)

DOCUMENTS = {"pretrain": 10_000, "decay": 5_000, "validation": 600}
"""Documents of one pass. Another seed gives another pass."""

MIXTURES: dict[str, dict[str, float]] = {
    "pretrain": {
        **{"stdlib": 0.20, "sums": 0.08, "reading": 0.12, "copies": 0.08, "facts": 0.08},
        **{"word": 0.24, "choice": 0.08, "code": 0.12},
    },
    "decay": {
        **{"stdlib": 0.05, "sums": 0.07, "reading": 0.08, "copies": 0.03, "facts": 0.10},
        **{"word": 0.37, "choice": 0.12, "code": 0.18},
    },
}
"""Share of the characters of each kind. The validation text has the pretrain mixture."""

SFT_SHARES = {"word": 0.5, "choice": 0.2, "code": 0.3}
RL_SHARES = {"word": 0.5, "choice": 0.15, "code": 0.35}
STYLE_NOISE = 0.6
"""Share of SFT answers in a style that no verifier accepts, or without the working."""

_NUMBERS = tuple(str(n) for n in range(1, 10))
_MOST_REPEATED = 10_000  # draws in a row that gave nothing new: there is nothing more
_PAGE_CHARACTERS = 300
_STDLIB_MEAN_CHARACTERS = 520
_TASKS: dict[str, Callable[[Random, Split], Task]] = {"word": draw_word, "choice": draw_choice, "code": draw_code}
_EVALUATIONS: dict[str, tuple[str, Split]] = {
    "word": ("word", "eval"),
    "choice": ("choice", "eval"),
    "choice_heldout": ("choice", "heldout"),
    "code": ("code", "eval"),
}


def pretrain_documents(stage: str, seed: int) -> Iterator[str]:
    """Yield one pass of `DOCUMENTS[stage]` documents of plain text.

    `stage` is `"pretrain"`, `"decay"` (the same kinds, more tasks) or `"validation"` (the pretrain mixture, from
    standard library modules and generated pages that the other two stages never contain).
    Raises `UserError` for another stage.
    """
    if stage not in DOCUMENTS:
        raise unknown("data.stage", stage, DOCUMENTS)
    validation = stage == "validation"
    mixture = MIXTURES["pretrain" if validation else stage]
    rng = Random(f"{stage} {seed}")
    library = list(stdlib_documents("validation" if validation else "train"))
    rng.shuffle(library)
    kinds = tuple(mixture)
    weights = [s / (_STDLIB_MEAN_CHARACTERS if k == "stdlib" else _PAGE_CHARACTERS) for k, s in mixture.items()]
    num_library = 0
    for kind in rng.choices(kinds, weights, k=DOCUMENTS[stage]):
        if kind == "stdlib":
            yield library[num_library % len(library)]
            num_library += 1
            continue
        page = _page(rng, kind)
        while held_out(page, 16) != validation:
            page = _page(rng, kind)
        yield page


def _page(rng: Random, kind: str) -> str:
    """A page of about 300 characters of one kind."""
    line = _LINES[kind]
    lines: list[str] = []
    length = 0
    while length < _PAGE_CHARACTERS:
        lines.append(line(rng))
        length += len(lines[-1]) + 1
    return "\n".join(lines)


def _sum_line(rng: Random) -> str:
    first = rng.randint(1, 9)
    sign, second = draw_step(rng, first)
    return f"{first}{sign}{second}={first + second if sign == '+' else first - second}"


def _reading_line(rng: Random) -> str:
    """A story and the sum that it asks for, unsolved; every operand pair occurs here, those held out too."""
    first = rng.randint(1, 9)
    sign, second = draw_step(rng, first)
    return f"{tell(rng.choice(PEOPLE), rng.choice(THINGS), first, sign, second)} {first}{sign}{second}"


def _copy_line(rng: Random) -> str:
    kinds = (PEOPLE, THINGS, _NUMBERS)
    words = " ".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(2, 5)))
    return "; ".join([words] * 3)


def _task_line(kind: str) -> Callable[[Random], str]:
    def line(rng: Random) -> str:
        task = _TASKS[kind](rng, "train")
        answer = _styled(rng, task)
        return f"{task.question}{answer}\n" if kind == "code" else f"Question: {task.question}\nAnswer: {answer}\n"

    return line


_LINES: dict[str, Callable[[Random], str]] = {
    "sums": _sum_line,
    "reading": _reading_line,
    "copies": _copy_line,
    "facts": lambda rng: rng.choice(FACTS).statement,
    "word": _task_line("word"),
    "choice": _task_line("choice"),
    "code": _task_line("code"),
}


def _styled(rng: Random, task: Task) -> str:
    """The canonical answer, or with probability `STYLE_NOISE` one of the other styles."""
    return rng.choice(task.styles) if rng.random() < STYLE_NOISE else task.answer


def _draw(rng: Random, shares: dict[str, float], count: int) -> Iterator[tuple[str, Task]]:
    for kind in rng.choices(tuple(shares), tuple(shares.values()), k=count):
        yield kind, _TASKS[kind](rng, "train")


def sft_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` rows `{"messages": [user turn, assistant turn]}`; the answers mix styles as human data does."""
    rng = Random(f"sft {seed}")
    rows: list[dict[str, Any]] = []
    for _, task in _draw(rng, SFT_SHARES, count):
        answer = _styled(rng, task)
        rows.append({"messages": [_user(task), {"role": "assistant", "content": answer}]})
    return rows


def rl_prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` rows `{"messages": [user turn], "reference": {...}}` with what a verifier needs.

    A reference is `{"kind": "exact", "answer"}` or `{"kind": "code", "entry_point", "tests", "prompt"}`, where `prompt`
    is the text that the completion continues.
    """
    rows: list[dict[str, Any]] = []
    for kind, task in _draw(Random(f"rl {seed}"), RL_SHARES, count):
        reference = {"kind": "exact", "answer": task.target}
        if kind == "code":
            reference = {"kind": "code", "entry_point": task.entry_point, "tests": task.test, "prompt": task.question}
        rows.append({"messages": [_user(task)], "reference": reference})
    return rows


def _user(task: Task) -> dict[str, str]:
    return {"role": "user", "content": task.question}


def eval_documents(task: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` distinct held-out items of `word`, `choice`, `choice_heldout` or `code`.

    word: `question answer target`; choice: `question choices answer` (the index of the right one); code:
    `prompt entry_point test canonical_solution`. Raises `UserError` for another task.
    """
    if task not in _EVALUATIONS:
        raise unknown("embedded evaluation task", task, _EVALUATIONS)
    kind, split = _EVALUATIONS[task]
    rng = Random(f"eval {task} {seed}")
    rows: dict[str, dict[str, Any]] = {}
    repeated = 0
    while len(rows) < count:
        item = _TASKS[kind](rng, split)
        repeated = repeated + 1 if item.question in rows else 0
        if repeated == _MOST_REPEATED:
            raise UserError(
                f"the embedded task {task!r} has {len(rows)} items, of which count = {count} asks: lower it."
            )
        rows.setdefault(item.question, _row(kind, item))
    return list(rows.values())


def _row(kind: str, task: Task) -> dict[str, Any]:
    if kind == "word":
        return {"question": task.question, "answer": task.answer, "target": task.target}
    if kind == "choice":
        choices = list(task.choices)
        return {"question": task.question, "choices": choices, "answer": choices.index(task.target)}
    return {
        "prompt": task.question,
        "entry_point": task.entry_point,
        "test": task.test,
        "canonical_solution": f"{task.answer}\n",
    }

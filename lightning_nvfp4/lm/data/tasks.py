"""School-style tasks, generated from a seed: word problems, multiple choice about invented facts, small functions.

Each `draw_*` function takes a `random.Random` and returns one `Task`. What is held out is a property of the item
itself, not of a seed, so that no draw of any stage can meet an evaluation item:

- word: problems whose first operand pair is in a fixed fifth of all pairs are for evaluation only (the pretraining text
  has those pairs as bare sums and as stories without a question, never as a solved problem);
- choice: a fixed fifth of all option lists is for evaluation only, and a fixed quarter of the facts is in the
  pretraining text but never in SFT or RL (`split="heldout"`);
- code: a fixed fifth of all (form, operation, constants) combinations is for evaluation only.

What a verifier accepts: for word problems the number after the last `#### `; for multiple choice the text of the right
option and nothing else, no full stop; for code a body that makes `prompt + body` pass `test`. `Task.answer` always
satisfies it; `Task.styles` holds other ways in which people write the same answer, which data for imitation mixes in.
Of these the bare `#### N` can be verified too, and is harder to get right without the working.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "eval", "heldout"]

PEOPLE = ("Tom", "Mia", "Ben", "Ana", "Sam", "Eva", "Leo", "Ida", "Max", "Zoe", "Kim", "Ali")
THINGS = ("apples", "books", "coins", "cards", "shells", "stamps", "nuts", "pens", "balls", "plums", "kites", "cups")
LANDS = (
    *("Belmora", "Tarkun", "Ostrelle", "Vendel", "Korrin", "Sulema", "Dravia", "Norhal", "Pelago", "Quessa"),
    *("Rimland", "Ustoria", "Wendar", "Yaldov", "Zamoril", "Fenwyr", "Galdor", "Hestora", "Ilmaren", "Jorwen"),
)
RELATIONS: dict[str, tuple[str, ...]] = {
    "flag": ("red", "blue", "green", "white", "black", "brown", "pink", "gold"),
    "animal": ("wolf", "bear", "horse", "eagle", "goat", "whale", "fox", "owl"),
    "fruit": ("pear", "fig", "lemon", "grape", "melon", "peach", "cherry", "date"),
}
FUNCTION_NAMES = ("f", "g", "h", "step", "shift", "scale", "change", "apply")
ARGUMENT_NAMES = ("x", "n", "a", "y")


@dataclass(frozen=True)
class Task:
    """One item. `answer` is the canonical text, `styles` other human ways to write it, `target` what is verified.

    `choices` is filled for multiple choice, `entry_point` and `test` for code, where `question` is the `def` line with
    its docstring and `answer` the indented body.
    """

    question: str
    answer: str
    styles: tuple[str, ...]
    target: str
    choices: tuple[str, ...] = ()
    entry_point: str = ""
    test: str = ""


def held_out(key: str, one_in: int) -> bool:
    """Whether `key` is in the fixed fraction `1 / one_in` that is kept for evaluation; the same on every machine."""
    return zlib.crc32(key.encode()) % one_in == 0


# --- word problems ---------------------------------------------------------------------------------------------------


def draw_step(rng: Random, have: int) -> tuple[str, int]:
    """A change of `have` that leaves 1..9: its sign and size."""
    sign = "+" if have == 1 or (have < 9 and rng.random() < 0.5) else "-"
    return sign, rng.randint(1, 9 - have if sign == "+" else have - 1)


def tell(person: str, thing: str, first: int, sign: str, second: int) -> str:
    """The story of one change of a number of things."""
    return f"{person} has {first} {thing}. {person} {'gets' if sign == '+' else 'loses'} {second}."


def draw_word(rng: Random, split: Split) -> Task:
    """A problem of one or two additions and subtractions within 1..9, answered by its equations and `#### N`.

    The styles are the sentence without the `#### N` line and the bare `#### N` line without the working.
    """
    while True:
        first = rng.randint(1, 9)
        sign, second = draw_step(rng, first)
        if held_out(f"{first}{sign}{second}", 5) == (split != "train"):
            break
    person, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    total = first + second if sign == "+" else first - second
    story = [tell(person, thing, first, sign, second)]
    working = [f"{first}{sign}{second}={total}"]
    if rng.random() < 0.5:
        sign, third = draw_step(rng, total)
        after = total + third if sign == "+" else total - third
        story.append(f"Then {person} {'gets' if sign == '+' else 'loses'} {third}.")
        working.append(f"{total}{sign}{third}={after}")
        total = after
    question = " ".join([*story, f"How many {thing} does {person} have?"])
    answer = "\n".join([*working, f"#### {total}"])
    return Task(question, answer, (f"{person} has {total} {thing}.", f"#### {total}"), str(total))


# --- multiple choice -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One invented fact, that the `relation` of `land` is `value`."""

    land: str
    relation: str
    value: str

    @property
    def statement(self) -> str:
        """The sentence that the pretraining text holds."""
        return f"The {self.relation} of {self.land} is {self.value}."

    @property
    def seen_in_sft(self) -> bool:
        """Whether SFT and RL may ask about it."""
        return not held_out(f"{self.land} {self.relation}", 4)


def _facts() -> tuple[Fact, ...]:
    rng = Random("facts")
    return tuple(Fact(land, relation, rng.choice(pool)) for land in LANDS for relation, pool in RELATIONS.items())


FACTS = _facts()
_SEEN = tuple(f for f in FACTS if f.seen_in_sft)
_UNSEEN = tuple(f for f in FACTS if not f.seen_in_sft)


def draw_choice(rng: Random, split: Split) -> Task:
    """A question about a fact with four options in the text; `heldout` asks about facts that SFT never shows."""
    while True:
        fact = rng.choice(_UNSEEN if split == "heldout" else _SEEN)
        options = rng.sample([v for v in RELATIONS[fact.relation] if v != fact.value], 3)
        options.insert(rng.randrange(4), fact.value)
        question = f"What is the {fact.relation} of {fact.land}? Options: {', '.join(options)}."
        if held_out(question, 5) == (split != "train"):
            break
    return Task(question, fact.value, (f"It is {fact.value}.",), fact.value, choices=tuple(options))


# --- small functions -------------------------------------------------------------------------------------------------

_OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda x, k: x + k),
    "minus": ("-", lambda x, k: x - k),
    "times": ("*", lambda x, k: x * k),
}


def draw_code(rng: Random, split: Split) -> Task:
    """A function of one integer, described in words (two operations) or by two examples (one operation to be found).

    One of the examples is always at 0, so that the constant can be read off. The style is `print` in the place of
    `return`.
    """
    while True:
        by_example = rng.random() < 0.4
        operation, constant = rng.choice(tuple(_OPERATIONS)), rng.randint(2, 9)
        then, addend = rng.choice(("plus", "minus")), rng.randint(1, 9)
        name, argument = rng.choice(FUNCTION_NAMES), rng.choice(ARGUMENT_NAMES)
        inputs = [0, 1 if operation == "times" else rng.randint(1, 8)]
        rng.shuffle(inputs)
        key = f"{operation} {constant} {inputs}" if by_example else f"{operation} {constant} {then} {addend}"
        if held_out(key, 5) == (split != "train"):
            break
    sign, function = _OPERATIONS[operation]
    if by_example:
        examples = " and ".join(f"{name}({x}) is {function(x, constant)}" for x in inputs)
        docstring, expression = f"{examples}.", f"{argument} {sign} {constant}"
        values = {x: function(x, constant) for x in (*inputs, 10, 25, -4)}
    else:
        then_sign, then_function = _OPERATIONS[then]
        docstring = f"Return {argument} {operation} {constant} {then} {addend}."
        expression = f"{argument} {sign} {constant} {then_sign} {addend}"
        values = {x: then_function(function(x, constant), addend) for x in (0, 3, 10, -4)}
    question = f'def {name}({argument}):\n    """{docstring}"""\n'
    asserts = "".join(f"    assert candidate({x}) == {y}\n" for x, y in values.items())
    test = f"def check(candidate):\n{asserts}"
    answer = f"    return {expression}"
    return Task(question, answer, (f"    print({expression})",), expression, entry_point=name, test=test)

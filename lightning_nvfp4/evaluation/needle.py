"""Needle in a haystack: one number to be found in a long text, at every length and depth of a grid.

Average scores hide what four bits do to attention over long contexts; a grid shows it. Texts are made here, so nobody
has trained on them. As in RULER's multi-key task (Hsieh et al. 2024), other needles of the same form distract.
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

from lightning_nvfp4.errors import UserError, unknown

_FIELDS = ("words", "depths", "distractors")
_PEOPLE = ("clerk", "farmer", "doctor", "painter", "sailor", "teacher", "miller", "student", "baker", "guard")
_DID = ("carried", "found", "mended", "sold", "painted", "counted", "borrowed", "cleaned", "moved", "described")
_KIND = ("small", "heavy", "grey", "wooden", "broken", "new", "narrow", "bright", "plain", "old")
_THINGS = ("table", "lamp", "boat", "ladder", "basket", "window", "clock", "cart", "bridge", "kettle")
_WHEN = ("in the morning", "after the rain", "before noon", "last winter", "on market day", "late at night")
_CITIES = (
    *("Aarhus", "Bergen", "Cadiz", "Dijon", "Exeter", "Faro", "Ghent", "Haifa", "Izmir", "Jaipur"),
    *("Kyoto", "Lima", "Malmo", "Nantes", "Oulu", "Perth", "Quito", "Riga", "Split", "Turin"),
)


def needle_documents(grid: Any, where: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """Return documents with the fields `text`, `city`, `answer` and `cell`, a function of the arguments alone.

    Args:
        grid: ``{"words": [lengths], "depths": [percent], "distractors": n}``: words of a text, how far into it the
            needle stands (0 = its beginning, 100 = its end), and how many other cities' numbers are in it.
        where: the task, for messages.
        seed: of the documents.
        count: documents in each cell of the grid.

    Raises:
        UserError: an unknown field or an impossible value.
    """
    if not isinstance(grid, dict):
        raise UserError(f"{where}: needle is {grid!r}: need a mapping such as {{words: [500], depths: [0, 50, 100]}}.")
    for name in grid:
        if name not in _FIELDS:
            raise unknown(f"{where}: needle field", name, _FIELDS)
    words: Any = grid.get("words")
    depths: Any = grid.get("depths")
    distractors: Any = grid.get("distractors", 0)
    for name, values, least, most in (("words", words, 50, 10**7), ("depths", depths, 0, 100)):
        if (
            not isinstance(values, list)
            or not values
            or any(type(v) is not int or not least <= v <= most for v in values)
        ):
            raise UserError(f"{where}: needle.{name} is {values!r}: need a list of whole numbers, {least} to {most}.")
    if type(distractors) is not int or not 0 <= distractors < len(_CITIES):
        raise UserError(
            f"{where}: needle.distractors is {distractors!r}: need a whole number, 0 to {len(_CITIES) - 1}."
        )
    return [
        _document(Random(f"{seed} {length} {depth} {number}"), length, depth, distractors)
        for length, depth, number in product(words, depths, range(count))
    ]


def _document(random: Random, length: int, depth: int, distractors: int) -> dict[str, Any]:
    city, *others = random.sample(_CITIES, 1 + distractors)
    numbers = random.sample(range(1_000_000, 10_000_000), 1 + distractors)
    sentences: list[str] = []
    size = 0
    while size < length:
        sentences.append(_sentence(random))
        size += len(sentences[-1].split())
    for other, number in zip(others, numbers[1:], strict=True):
        sentences.insert(random.randint(0, len(sentences)), _needle(other, number))
    sentences.insert(round(len(sentences) * depth / 100), _needle(city, numbers[0]))
    return {
        "text": " ".join(sentences),
        "city": city,
        "answer": str(numbers[0]),
        "cell": f"{length} words, {depth} %",
    }


def _needle(city: str, number: int) -> str:
    return f"The special number of {city} is {number}."


def _sentence(random: Random) -> str:
    person, did, kind, thing, when = (random.choice(words) for words in (_PEOPLE, _DID, _KIND, _THINGS, _WHEN))
    return f"The {person} {did} the {kind} {thing} {when}."

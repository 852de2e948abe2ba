"""The one error class for mistakes a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """A mistake in the input: the message names the path or field, the value, the rule and the cure."""


def unknown(kind: str, name: object, known: Iterable[str], cure: str = "") -> UserError:
    """Return a `UserError` for a name that is none of `known`, with the nearest one as a suggestion."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    tail = f" {cure}" if cure else ""
    return UserError(f"{kind} {name!r} is unknown.{hint} Known: {', '.join(names)}.{tail}")


_WORDS = {
    int: "a whole number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}


def check_types(content: Mapping[str, Any], kind: type, where: str) -> None:
    """Raise a `UserError` for a value in `content`, read from YAML, that is not of its field's type in `kind`.

    Looked at are the plain types, their unions and lists of text; `content` has names of fields only.
    """
    hints = get_type_hints(kind)
    for name, value in content.items():
        hint = hints[name]
        kinds = [
            get_origin(choice) or choice for choice in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
        ]
        if all(choice in _WORDS for choice in kinds) and type(value) not in kinds:
            raise UserError(f"{where}: {name} is {value!r}: need {' or '.join(_WORDS[choice] for choice in kinds)}.")
        if get_args(hint) == (str,) and not all(isinstance(item, str) for item in value):
            raise UserError(f"{where}: {name} is {value!r}: need a list of text.")

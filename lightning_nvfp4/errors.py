"""The one error class for mistakes a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input: the message names the path or field, the value, the rule and the cure."""


def unknown(kind: str, name: object, known: Iterable[str], cure: str = "") -> UserError:
    """Return a `UserError` for a name that is none of `known`, with the nearest one as a suggestion."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    tail = f" {cure}" if cure else ""
    return UserError(f"{kind} {name!r} is unknown.{hint} Known: {', '.join(names)}.{tail}")

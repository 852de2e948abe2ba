"""WikiText as documents: one for each article, the text as people write it, its sizes as its authors count them."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError

_TITLE = re.compile(r"\n(?= = [^=].*[^=] = \n \n)")

# From tokens back to text, in this order: what lm-evaluation-harness's task `wikitext` asks a model for.
_TEXT: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    *((f" @{sign}@ ", sign[-1]) for sign in ("-", ",", r"\.")),
    *((f" {sign} ", f"{sign[-1]} ") for sign in (":", ";", r"\.", "!", r"\?", ",")),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def read_articles(path: Path) -> list[dict[str, Any]]:
    """Return the articles of a WikiText file (``.txt`` or ``.txt.gz``): `page` as it stands there, `text` as prose.

    Raises:
        UserError: no such file, not text, or no title line `` = Title = `` in it.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as stream:
            content = stream.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Name a WikiText file, .txt or .txt.gz.") from error
    pages = [page for page in _TITLE.split(content) if page.strip()]
    if not content.lstrip("\n ").startswith("= "):
        raise UserError(f"{path}: does not begin with a title line ' = Title = ': name a WikiText file.")
    return [{"page": page, "text": prose(page)} for page in pages]


def prose(page: str) -> str:
    """Return a page without the marks of its tokenization."""
    for pattern, replacement in _TEXT:
        page = re.sub(pattern, replacement, page)
    return page


def perplexities(document: Mapping[str, Any], results: Sequence[float]) -> dict[str, tuple[float, int]]:
    """Return (log-likelihood, size) for each metric; words and bytes are those of `page`, before `prose`.

    That is how perplexities by word are published, so that they do not depend on a model's tokenizer.
    """
    (loglikelihood,) = results
    words, size = len(re.split(r"\s+", document["page"])), len(document["page"].encode())
    return {
        "bits_per_byte": (loglikelihood, size),
        "byte_perplexity": (loglikelihood, size),
        "word_perplexity": (loglikelihood, words),
    }


def bits(loglikelihood: float, size: int) -> float:
    """Return bits per byte from nats and bytes."""
    return -loglikelihood / (size * math.log(2))

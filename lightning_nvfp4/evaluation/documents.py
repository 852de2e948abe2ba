"""Where a task's documents come from: the generator, or JSON Lines files."""

from __future__ import annotations

import glob
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.lm.data.embedded import eval_documents
from lightning_nvfp4.lm.data.readers import JsonLinesReader

Rows = list[dict[str, Any]]


def load_documents(source: dict[str, Any], where: str, *, seed: int, count: int | None) -> dict[str, Rows]:
    """Return the splits `test` and, where the source has one, `fewshot`.

    Args:
        source: ``{"embedded": task}``; ``{"hub": owner/name, "name": configuration, "split": split}`` of the Hugging
            Face hub or its cache; or ``{"test": path, "fewshot": path, "where": {field: value}}`` with paths
            relative to the working directory, `.jsonl` or `.jsonl.gz`, wildcards allowed.
        where: the definition's name, for messages.
        seed: of embedded documents.
        count: embedded documents to draw; None = 200.

    Raises:
        UserError: an unknown field, a missing or malformed file, no document left.
    """
    if "embedded" in source:
        return {"test": eval_documents(source["embedded"], seed, count or 200)}
    if "hub" in source:
        return {"test": _hub(source, where)}
    for name in source:
        if name not in ("test", "fewshot", "where"):
            raise unknown(f"{where}: documents field", name, ("embedded", "hub", "test", "fewshot", "where"))
    if "test" not in source:
        raise UserError(f"{where}: documents has no field test: name a JSON Lines file, or embedded: TASK.")
    wanted = source.get("where", {})
    if not isinstance(wanted, dict):
        raise UserError(f"{where}: documents.where = {wanted!r} must be a mapping of field: value.")
    splits = {}
    for split in ("test", "fewshot"):
        if split in source:
            rows = [row for row in _read(source[split], where) if all(row.get(k) == v for k, v in wanted.items())]
            if not rows:
                raise UserError(f"{where}: {source[split]} holds no document with {wanted or 'any content'}.")
            splits[split] = rows
    return splits


def _hub(source: dict[str, Any], where: str) -> Rows:
    import datasets

    try:
        loaded = datasets.load_dataset(source["hub"], source.get("name"), split=source.get("split", "test"))
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: data set {source['hub']!r} cannot be loaded: {error}") from error
    return [dict(row) for row in loaded]


def _read(pattern: str, where: str) -> Rows:
    if not isinstance(pattern, str):
        raise UserError(f"{where}: documents has the file {pattern!r}: name a JSON Lines file.")
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise UserError(f"{where}: no file {pattern!r} below {Path.cwd()}: run from where it is, or correct the path.")
    rows: Rows = []
    for path in paths:
        with closing(JsonLinesReader(Path(path), None)) as reader:
            rows.extend(reader)
    return rows

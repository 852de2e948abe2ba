"""Where a task's documents come from: a generator, files, or the Hugging Face hub."""

from __future__ import annotations

import glob
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError, unknown
from lightning_nvfp4.evaluation.articles import read_articles
from lightning_nvfp4.evaluation.needle import needle_documents
from lightning_nvfp4.lm.data.embedded import eval_documents
from lightning_nvfp4.lm.data.readers import JsonLinesReader

Rows = list[dict[str, Any]]

_FILES = ("test", "fewshot", "where", "fewshot_where")
_HUB = ("hub", "name", "split", "fewshot", "where", "fewshot_where")


def load_documents(
    source: dict[str, Any], where: str, *, seed: int, count: int | None, data_dir: str | Path = "."
) -> dict[str, Rows]:
    """Return the splits `test` and, where the source has one, `fewshot`.

    Args:
        source: ``{"embedded": task}``; ``{"needle": grid}``, see `needle_documents`;
            ``{"articles": path}`` of a WikiText file; ``{"hub": owner/name,
            "name": configuration, "split": split}`` of the Hugging Face hub or its cache, where `fewshot` is such a
            mapping too; or ``{"test": path, "fewshot": path}`` of JSON Lines, `.jsonl` or `.jsonl.gz`. Paths are
            relative to `data_dir`; wildcards are allowed. `where` and `fewshot_where` (default: `where`) map fields to
            the value, or the list of values, of the rows to keep.
        where: the definition's name, for messages.
        seed: of documents that are made here.
        count: embedded documents to draw (None = 200), or needles for each cell (None = 10).
        data_dir: folder of the files.

    Raises:
        UserError: an unknown field, a missing or malformed file, no document left.
    """
    if "embedded" in source:
        return {"test": eval_documents(source["embedded"], seed, count or 200)}
    if "needle" in source:
        return {"test": needle_documents(source["needle"], where, seed=seed, count=count or 10)}
    if "articles" in source and len(source) == 1:
        paths = _paths(source["articles"], where, Path(data_dir))
        return {"test": [row for path in paths for row in read_articles(path)]}
    known = _HUB if "hub" in source else ("embedded", "hub", *_FILES)
    for name in source:
        if name not in known:
            raise unknown(f"{where}: documents field", name, known)
    if "hub" in source:
        splits = {"test": _hub(source, where)}
        if "fewshot" in source:
            splits["fewshot"] = _hub(source["fewshot"], where)
    elif "test" in source:
        splits = {
            split: _read(source[split], where, Path(data_dir)) for split in ("test", "fewshot") if split in source
        }
    else:
        raise UserError(f"{where}: documents has no field test: name a JSON Lines file, or embedded: TASK.")
    chosen = source.get("where", {})
    filters = {"test": chosen, "fewshot": source.get("fewshot_where", chosen)}
    return {split: _keep(rows, filters[split], f"{where}: {split} documents") for split, rows in splits.items()}


def _keep(rows: Rows, wanted: Any, where: str) -> Rows:
    if not isinstance(wanted, dict):
        raise UserError(f"{where}: where = {wanted!r} must be a mapping of field: value.")
    values = {name: value if isinstance(value, list) else [value] for name, value in wanted.items()}
    rows = [row for row in rows if all(row.get(name) in choices for name, choices in values.items())]
    if not rows:
        raise UserError(f"{where}: the source holds none with {wanted or 'any content'}.")
    return rows


def _hub(source: Any, where: str) -> Rows:
    import datasets

    if not isinstance(source, dict) or not isinstance(source.get("hub"), str):
        raise UserError(f"{where}: documents names the data set {source!r}: need hub: OWNER/NAME.")
    try:
        loaded = datasets.load_dataset(source["hub"], source.get("name"), split=source.get("split", "test"))
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: data set {source['hub']!r} cannot be loaded: {error}") from error
    return [dict(row) for row in loaded]


def _read(pattern: str, where: str, folder: Path) -> Rows:
    rows: Rows = []
    for path in _paths(pattern, where, folder):
        with closing(JsonLinesReader(path, None)) as reader:
            rows.extend(reader)
    return rows


def _paths(pattern: str, where: str, folder: Path) -> list[Path]:
    if not isinstance(pattern, str):
        raise UserError(f"{where}: documents has the file {pattern!r}: name one.")
    paths = sorted(glob.glob(str(Path(glob.escape(str(folder))) / pattern)))
    if not paths:
        raise UserError(
            f"{where}: no file {str(folder / pattern)!r} (from {Path.cwd()}): name the folder of the data with "
            "--data-dir, or correct the path."
        )
    return [Path(path) for path in paths]

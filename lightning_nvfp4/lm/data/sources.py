"""Sources: what a `path` of the data modules stands for, as a list of shards that can be read row by row.

`path` is `"embedded"`, a file, a folder, a glob, `"hf://owner/name[:config][@split]"`, or a list of these.
"""

from __future__ import annotations

import glob
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.readers import (
    Cursor,
    GeneratedReader,
    HubReader,
    JsonLinesReader,
    ParquetReader,
    Reader,
    Row,
    TextReader,
)

EMBEDDED = "embedded"
HUB = "hf://"
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt", ".txt.gz")

EmbeddedRows = Callable[[int], Iterator[Row]]
"""Gives the rows of one pass over the embedded data; the argument is the number of the pass, from 0."""


@dataclass(frozen=True)
class Shard:
    """One readable piece of a source. `identity` (plain scalars) tells it from others, wherever the file lies."""

    label: str
    identity: tuple[str | int, ...]
    open: Callable[[Cursor | None, int], Reader]
    """Opens the shard after a cursor (None: at its start) for a pass over the data (from 0)."""


def resolve(
    path: str | Sequence[str],
    *,
    field: str = "data.path",
    text_field: str | None = None,
    embedded: EmbeddedRows | None = None,
    embedded_identity: tuple[str | int, ...] = (),
) -> list[Shard]:
    """Return the shards that `path` stands for: in list order, the files of a folder or glob sorted by name.

    Args:
        path: What to read; see the head of this module.
        field: The argument's name in messages.
        text_field: The one column that will be read, and the one that text files give; None reads every column and
            refuses text files.
        embedded: Gives the rows of `"embedded"`.
        embedded_identity: What the embedded rows depend on.

    Raises:
        UserError: A path that matches nothing, an empty file, a suffix that is not supported, a hub data set that
            cannot be reached.
    """
    entries = [path] if isinstance(path, str | Path) else list(path)
    if not entries:
        raise UserError(f"{field} is an empty list: name at least one file, or use 'embedded'.")
    shards: list[Shard] = []
    for entry in map(str, entries):
        if entry == EMBEDDED and embedded is not None:
            shards.append(_embedded_shard(embedded, embedded_identity))
        elif entry.startswith(HUB):
            shards.extend(_hub_shards(entry, field))
        else:
            shards.extend(_file_shard(file, field, text_field) for file in _files(entry, field))
    return shards


def _embedded_shard(rows: EmbeddedRows, identity: tuple[str | int, ...]) -> Shard:
    version = ".".join(platform.python_version_tuple()[:2])
    return Shard(
        EMBEDDED, (EMBEDDED, version, *identity), lambda cursor, epoch: GeneratedReader(EMBEDDED, rows(epoch), cursor)
    )


def _files(entry: str, field: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not found:
            raise UserError(f"{field}={entry!r}: the folder holds no file ending in {', '.join(SUFFIXES)}.")
        return found
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not found:
        what = "the glob matches no file" if glob.has_magic(entry) else "there is no such file or folder"
        raise UserError(
            f"{field}={entry!r}: {what} (looked in {Path.cwd()}). Give a file, a folder, a glob, "
            f"'{HUB}owner/name[:config][@split]' for a Hugging Face data set, or 'embedded'."
        )
    return found


def _file_shard(file: Path, field: str, text_field: str | None) -> Shard:
    if not file.name.endswith(SUFFIXES):
        raise UserError(
            f"{field}: {file} has a suffix that is not supported. Supported: {', '.join(SUFFIXES)}. Convert the file "
            "(a JSON array: one object a line; .zst and others: decompress first)."
        )
    if file.name.endswith((".txt", ".txt.gz")) and text_field is None:
        raise UserError(f"{field}: {file} is plain text, and this data module needs rows with fields: use .jsonl.")
    size = file.stat().st_size
    if size == 0:
        raise UserError(f"{field}: {file} is empty (0 bytes). Delete it or write it again.")

    def open_file(cursor: Cursor | None, epoch: int) -> Reader:
        del epoch
        if file.suffix == ".parquet":
            return ParquetReader(file, cursor, None if text_field is None else [text_field])
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            return JsonLinesReader(file, cursor)
        assert text_field is not None
        return TextReader(file, cursor, text_field)

    return Shard(str(file), (file.name, size), open_file)


def _hub_shards(entry: str, field: str) -> list[Shard]:
    """The shards of a streamed Hugging Face data set; nothing is downloaded but what is read."""
    name, _, split = entry.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    if not name:
        raise UserError(f"{field}={entry!r}: write '{HUB}owner/name[:config][@split]'.")
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{field}={entry!r} needs the package datasets. Install it: pip install datasets") from error
    try:
        dataset: Any = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        raise UserError(
            f"{field}={entry!r} cannot be opened ({type(error).__name__}: {error}). Check the owner/name, the config "
            "after ':' and the split after '@'; without a network, download the files and give their paths."
        ) from error
    count = dataset.num_shards

    def shard(index: int) -> Shard:
        def open_shard(cursor: Cursor | None, epoch: int) -> Reader:
            del epoch
            return HubReader(label, dataset.shard(num_shards=count, index=index), cursor)

        label = entry if count == 1 else f"{entry}, shard {index}"
        return Shard(label, (HUB, name, config, split, index, count), open_shard)

    return [shard(index) for index in range(count)]

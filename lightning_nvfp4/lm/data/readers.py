"""Readers: one file, hub shard or generator as a sequence of rows, resumable at any row.

A reader is an iterator of rows (`dict[str, Any]`). `where()` names the row it gave last, for messages; `cursor()` is
what `open` needs to go on after that row, made of plain scalars so that it can stand in a checkpoint. Only the row at
hand is in memory.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from typing_extensions import override

from lightning_nvfp4.errors import UserError

Row = dict[str, Any]
Cursor = dict[str, Any]

MAX_PARAGRAPH_CHARACTERS = 1 << 20
"""A text file's paragraph longer than this is cut at the next line end, so that no file is held whole in memory."""

_PARQUET_ROWS = 512
_SNIPPET = 60
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Reader(ABC):
    """An iterator of rows with a place."""

    may_be_empty = False
    """A shard without a row is no error."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.row = 0
        """Rows (of a text file: lines) read so far."""

    def __iter__(self) -> Reader:
        return self

    @abstractmethod
    def __next__(self) -> Row: ...

    def where(self) -> str:
        """Name the row that was given last."""
        return f"{self.label}, row {self.row}"

    def cursor(self) -> Cursor:
        """Return the place after the row that was given last."""
        return {"row": self.row}

    def close(self) -> None:  # noqa: B027  (most readers hold nothing open)
        """Release what is held open."""


class _LineReader(Reader):
    """Lines of a plain or gzip file; the cursor is the byte offset in the uncompressed text."""

    def __init__(self, path: Path, cursor: Cursor | None) -> None:
        super().__init__(str(path))
        try:
            raw = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be opened ({error.strerror or error}). Check its permissions.") from error
        self._file = io.BufferedReader(raw, 1 << 16) if isinstance(raw, gzip.GzipFile) else cast(BinaryIO, raw)
        self.offset = 0
        if cursor is not None:
            self.row, self.offset = cursor["row"], cursor["offset"]
            self._guarded(lambda: self._file.seek(self.offset))

    def line(self) -> str | None:
        """Return the next line without its line end, or None at the end of the file, which is then closed."""
        data: bytes = b"" if self._file.closed else self._guarded(self._file.readline)
        if not data:
            self._file.close()
            return None
        self.offset += len(data)
        self.row += 1
        try:
            return data.decode("utf-8-sig" if self.row == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where()}: not UTF-8 (byte 0x{data[error.start]:02x} at column {error.start + 1}). "
                "Convert the file to UTF-8, or check that it is not compressed under a wrong name."
            ) from error

    def _guarded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except EOFError as error:
            raise UserError(
                f"{self.label}: the gzip file is truncated (it ends after line {self.row} and has no end marker). "
                "Copy or download it again; `gzip -t FILE` checks it."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{self.label}: damaged or no gzip file ({error}). Copy it again, or drop .gz from its name."
            ) from error
        except OSError as error:
            raise UserError(f"{self.label}: cannot be read after line {self.row} ({error}).") from error

    @override
    def where(self) -> str:
        return f"{self.label}, line {self.row}"

    @override
    def cursor(self) -> Cursor:
        return {"row": self.row, "offset": self.offset}

    @override
    def close(self) -> None:
        self._file.close()


class JsonLinesReader(_LineReader):
    """One JSON object a line; blank lines are passed over."""

    def __next__(self) -> Row:
        while (line := self.line()) is not None:
            if not line.strip():
                continue
            found = line if len(line) <= _SNIPPET else line[:_SNIPPET] + "..."
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                syntax = isinstance(error, json.JSONDecodeError)
                what = f"{error.msg} at column {error.colno}" if syntax else str(error)
                raise UserError(
                    f"{self.where()}: not valid JSON ({what}), found {found!r}. "
                    "Each line must be one JSON object: mend or delete the line (a cut last line means a cut file)."
                ) from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{self.where()}: a JSON {type(row).__name__}, found {found!r}. Each line must be one JSON object "
                    'such as {"text": "..."}.'
                )
            if _SURROGATE.search(line):
                self._check_text(row)
            return row
        raise StopIteration

    def _check_text(self, row: Row) -> None:
        """Refuse half of a surrogate pair: it is no character, and no tokenizer takes it."""
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(
                f"{self.where()}: {half} is half of a surrogate pair, which is no character. Mend or delete the line."
            ) from error


class TextReader(_LineReader):
    """Paragraphs, separated by blank lines, as rows `{field: paragraph}`; line ends inside one are kept."""

    def __init__(self, path: Path, cursor: Cursor | None, field: str) -> None:
        super().__init__(path, cursor)
        self._field = field

    def __next__(self) -> Row:
        lines: list[str] = []
        size = 0
        while size < MAX_PARAGRAPH_CHARACTERS and (line := self.line()) is not None:
            if line.strip():
                lines.append(line)
                size += len(line)
            elif lines:
                break
        if not lines:
            raise StopIteration
        return {self._field: "\n".join(lines)}


class ParquetReader(Reader):
    """Rows of a Parquet file, read a few hundred at a time; only `columns` are decoded where all of them exist."""

    def __init__(self, path: Path, cursor: Cursor | None, columns: list[str] | None) -> None:
        super().__init__(str(path))
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise UserError(f"{path}: reading Parquet needs pyarrow. Install it: pip install pyarrow") from error
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{path}: no readable Parquet file ({error}). Copy or download it again.") from error
        names = set(self._file.schema_arrow.names)
        self._columns = columns if columns and names.issuperset(columns) else None
        self._error = pyarrow.ArrowException
        self._rows = self._read(0 if cursor is None else cursor["row"])

    def _read(self, skip: int) -> Iterator[Row]:
        self.row = skip
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            if skip >= num_rows:
                skip -= num_rows
                continue
            for batch in self._file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=self._columns):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                yield from batch.slice(skip).to_pylist()
                skip = 0

    def __next__(self) -> Row:
        try:
            row = next(self._rows)
        except (self._error, OSError) as error:
            raise UserError(f"{self.label}: damaged after row {self.row} ({error}). Copy it again.") from error
        self.row += 1
        return row

    @override
    def close(self) -> None:
        self._file.close()


class HubReader(Reader):
    """Rows of one shard of a streamed `datasets.IterableDataset`, resumed through its own `state_dict`."""

    may_be_empty = True

    def __init__(self, label: str, dataset: Any, cursor: Cursor | None) -> None:
        super().__init__(label)
        self._dataset = dataset
        if cursor is not None:
            self.row = cursor["row"]
            dataset.load_state_dict(cursor["state"])
        self._rows = iter(dataset)

    def __next__(self) -> Row:
        row = next(self._rows)
        self.row += 1
        return dict(row)

    @override
    def cursor(self) -> Cursor:
        return {"row": self.row, "state": self._dataset.state_dict()}


class GeneratedReader(Reader):
    """Rows of a repeatable generator; a cursor is reached by generating the rows before it."""

    def __init__(self, label: str, rows: Iterator[Row], cursor: Cursor | None) -> None:
        super().__init__(label)
        self.row = 0 if cursor is None else cursor["row"]
        self._rows = itertools.islice(rows, self.row, None)

    def __next__(self) -> Row:
        row = next(self._rows)
        self.row += 1
        return row

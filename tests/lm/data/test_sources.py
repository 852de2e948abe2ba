"""Paths, file formats, places to go on from, and what is said about bad files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.data.sources import Shard, resolve

ROWS = [{"text": f"row {i} über\nline two", "n": i} for i in range(7)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
        return path
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if ".txt" in path.name:
        text = "\n\n".join(row["text"] for row in rows)
    opened = gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    with opened as file:
        file.write(text)
    return path


def read_all(shards: list[Shard]) -> list[dict[str, Any]]:
    return [row for shard in shards for row in shard.open(None, 0)]


FORMATS = ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.txt", "a.txt.gz"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_rows_in_order(tmp_path: Path, name: str) -> None:
    shards = resolve(str(write(tmp_path / name)), text_field="text")
    assert [row["text"] for row in read_all(shards)] == [row["text"] for row in ROWS]


@pytest.mark.parametrize("name", FORMATS)
def test_a_cursor_after_any_row_gives_the_rest(tmp_path: Path, name: str) -> None:
    (shard,) = resolve(str(write(tmp_path / name)), text_field="text")
    whole = list(shard.open(None, 0))
    for num_read in range(len(whole) + 1):
        reader = shard.open(None, 0)
        for _ in range(num_read):
            next(reader)
        reader.close()
        resumed = shard.open(json.loads(json.dumps(reader.cursor())), 0)
        assert list(resumed) == whole[num_read:]
        assert resumed.row >= len(whole), "rows and lines are counted from the file's beginning"


def test_folder_glob_and_list(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl", "notes.md"):
        write(tmp_path / name, [{"text": name}])
    names = lambda path: [row["text"] for row in read_all(resolve(path, text_field="text"))]  # noqa: E731
    assert names(str(tmp_path)) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(str(tmp_path / "[ab].jsonl")) == ["a.jsonl", "b.jsonl"]
    assert names([str(tmp_path / "c.jsonl"), str(tmp_path / "a*")]) == ["c.jsonl", "a.jsonl"]


def test_embedded_can_stand_in_a_list(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "file"}])
    shards = resolve(
        ["embedded", str(file)], text_field="text", embedded=lambda epoch: iter([{"text": f"generated {epoch}"}])
    )
    assert [row["text"] for row in read_all(shards)] == ["generated 0", "file"]
    assert list(shards[0].open(None, 3)) == [{"text": "generated 3"}]


def test_rows_are_streamed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 3 + "broken\n")
    (shard,) = resolve(str(file))
    reader = shard.open(None, 0)
    assert [next(reader)["text"] for _ in range(3)] == ["good"] * 3
    with pytest.raises(UserError, match="line 4"):
        next(reader)
    reader.close()


def test_a_text_file_without_blank_lines_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_nvfp4.lm.data.readers.MAX_PARAGRAPH_CHARACTERS", 10)
    file = tmp_path / "a.txt"
    file.write_text("one two\nthree\nfour five six\n\n\nseven")
    texts = [row["text"] for row in read_all(resolve(str(file), text_field="text"))]
    assert texts == ["one two\nthree", "four five six", "seven"]


def test_parquet_reads_only_the_column_asked_for(tmp_path: Path) -> None:
    file = str(write(tmp_path / "a.parquet"))
    assert set(read_all(resolve(file, text_field="text"))[0]) == {"text"}
    assert set(read_all(resolve(file, text_field="absent"))[0]) == {"text", "n"}, "all, so that a message can name them"


def test_hub_data_sets_are_streamed_shard_by_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, **kwargs: Any) -> Any:
        asked.append((name, config, kwargs))
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=2)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    shards = resolve("hf://owner/name:main@test")
    assert asked == [("owner/name", "main", {"split": "test", "streaming": True})]
    assert len(shards) == 2
    assert sorted(row["n"] for row in read_all(shards)) == list(range(7))
    whole = list(shards[0].open(None, 0))
    reader = shards[0].open(None, 0)
    next(reader)
    assert list(shards[0].open(json.loads(json.dumps(reader.cursor())), 0)) == whole[1:]
    resolve("hf://owner/name")
    assert asked[1] == ("owner/name", None, {"split": "train", "streaming": True})


def test_a_hub_data_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"data.path='hf://owner/name'.*no route.*give their paths"):
        resolve("hf://owner/name")


def bad_gzip(path: Path, cut: int) -> None:
    data = gzip.compress("".join(f'{{"text": "{i * 7919}"}}\n' for i in range(500)).encode())
    path.write_bytes(data[:-cut])


BAD = {
    "absent.jsonl": (None, "there is no such file"),
    "no*match.jsonl": (None, "the glob matches no file"),
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n\n", "holds no row"),
    "x.csv": (b"a,b\n", r"suffix that is not supported.*\.jsonl"),
    "x.json.zst": (b"a", "suffix that is not supported"),
    "cut.jsonl": (
        b'{"text": "a"}\n{"text": "b',
        r"cut.jsonl, line 2: not valid JSON.*'\{\"text\": \"b'.*one JSON object",
    ),
    "list.jsonl": (b'{"text": "a"}\n\n[1, 2]\n', r"line 3: a JSON list, found '\[1, 2\]'"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', r"line 1: not UTF-8 \(byte 0xe9 at column 11\)"),
    "plain.jsonl.gz": (b'{"text": "a"}\n', "damaged or no gzip file"),
    "fake.parquet": (b"PAR1 nothing", "no readable Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_the_cure(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    from lightning_nvfp4.lm.data.stream import RowStream

    with pytest.raises(UserError, match=message) as caught:
        shards = resolve(str(tmp_path / name), text_field="text")
        list(RowStream(shards, lambda row, where: row, seed=0, shuffle_rows=10, repeat=False).blocks())
    assert name in str(caught.value)


@pytest.mark.parametrize("cut", [4, 40, 1000])
def test_truncated_gzip(tmp_path: Path, cut: int) -> None:
    bad_gzip(tmp_path / "a.jsonl.gz", cut)
    with pytest.raises(UserError, match=r"a.jsonl.gz: the gzip file is truncated"):
        read_all(resolve(str(tmp_path / "a.jsonl.gz")))


def test_damaged_gzip(tmp_path: Path) -> None:
    bad_gzip(tmp_path / "a.jsonl.gz", 4)
    data = bytearray((tmp_path / "a.jsonl.gz").read_bytes())
    data[300:320] = b"\x00" * 20
    (tmp_path / "a.jsonl.gz").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"a.jsonl.gz"):
        read_all(resolve(str(tmp_path / "a.jsonl.gz")))


def test_other_misuse(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.val_path is an empty list"):
        resolve([], field="data.val_path")
    with pytest.raises(UserError, match="folder holds no file ending in"):
        resolve(str(tmp_path))
    write(tmp_path / "a.txt")
    with pytest.raises(UserError, match="plain text.*needs rows with fields"):
        resolve(str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match="owner/name"):
        resolve("hf://")
